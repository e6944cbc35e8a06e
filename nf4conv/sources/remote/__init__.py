"""Reads from the Hugging Face Hub. Imports huggingface_hub, which takes a while.

asking.py     asks the Hub, by one rule for silence and for further tries
contents.py   compares downloaded files with the hashes that the Hub states
hub.py        fetches what is needed of a repository, whole files or ranges of bytes
stream.py     fetches weight files one ahead of their use, and drops them after it
"""
