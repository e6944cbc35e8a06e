"""The bytes that the codec and the checkpoint code agree on.

layout.py     says what tensors a 4-bit weight becomes: names, dtypes, sizes, and the JSON blob
codebook.py   holds the code values and cut points, as bit patterns
gguf.py       lists the types of values in GGUF files, and what a converter did to weights
units.py      writes numbers of bytes as people read them
"""
