"""Reads which tensors the weight files of a checkpoint hold together.

headers.py   reads the headers of all weight files, on disk or on the Hub
index.py     reads the index of a sharded checkpoint, and checks it against the headers
"""
