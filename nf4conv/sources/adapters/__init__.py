"""Reads LoRA adapters of PEFT, and merges them into a source."""
