"""Reads from the Hugging Face Hub. Imports huggingface_hub, which takes a while."""
