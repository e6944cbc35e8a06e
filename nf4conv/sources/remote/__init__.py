"""Reads from the Hugging Face Hub. Imports huggingface_hub, which takes a while.

asking.py      asks the Hub, by one rule for silence and for further tries
contents.py    compares downloaded files with the hashes that the Hub states
repository.py  fetches files of a repository at one commit, whole or in ranges of bytes
hub.py         fetches what a source needs of a repository, or finds it in the cache
ranges.py      reads a file by ranges of bytes that grow
stream.py      fetches weight files one ahead of their use, and drops them after it
"""
