"""Reads GGUF files of llama.cpp as the checkpoints of transformers that they were made from."""
