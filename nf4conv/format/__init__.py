"""What both halves know of the bytes: what a 4-bit weight becomes on disk, and its code values.

layout.py      the tensors of a 4-bit weight, their names, dtypes and sizes, and the JSON blob
codebook.py    the code values and cut points, as bit patterns
"""
