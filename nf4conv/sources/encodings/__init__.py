"""Presents weights that another quantization encoded as the float tensors that they stand for.

encoded.py       replaces the encoded tensors of a checkpoint by the tensors that they decode to
description.py   reads what the config says about a quantization
refused.py       refuses quantizations that are not decoded, by what a config says
quark.py         says what Quark of AMD stores
rules.py         recognises each kind of encoding by names, dtypes and shapes
scaled.py        recognises 8-bit values with scales
siblings.py      finds the tensors that belong together by their names
integers.py      recognises packed integers: compressed-tensors, GPTQ, AWQ, torchao and Quark
lines.py         cuts tensors that are stored as they are
integer_rows.py  cuts rows out of weights of packed integers
hqq.py           recognises weights of HQQ
bitsandbytes.py  recognises the weights of bitsandbytes, in 4 bits and in 8
cutting.py       cuts rows out of a matrix, or a matrix out of a stack, encoded or not
packed_runs.py   cuts runs of elements out of weights that bitsandbytes packed
pieces.py        cuts tensors, encoded or not, into pieces that can be decoded alone
types/           describes how tensors are decoded from others, a type for each encoding
"""
