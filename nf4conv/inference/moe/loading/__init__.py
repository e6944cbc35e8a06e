"""Works while transformers loads a checkpoint.

checkpoints.py  looks at a checkpoint, and has its experts stay packed
headers.py      finds the packed experts of a checkpoint by the headers of its files
converters.py   makes converters for transformers' loading: packed tensors → Experts4bit
operations.py   are the operations of these converters
quantize.py     packs experts of 16-bit models (NF4CONV_MOE=quantize)
"""
