"""Reads from the Hugging Face Hub. Imports huggingface_hub, which takes a while.

hub.py      fetches what is needed of a repository, whole files or ranges of bytes
stream.py   fetches weight files one ahead of their use, and drops them after it
"""
