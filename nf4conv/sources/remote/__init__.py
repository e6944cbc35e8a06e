"""The Hugging Face Hub. Imports huggingface_hub, which takes a while.

hub.py      resolves a repository, downloads files, reads ranges
stream.py   fetches weight files while they are needed, and drops them again
"""
