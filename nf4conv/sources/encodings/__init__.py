"""Presents weights that another quantization encoded as the float tensors that they stand for.

encoded.py       replaces the encoded tensors of a checkpoint by the tensors that they decode to
description.py   reads what the config says about a quantization
refused.py       refuses quantizations that are not decoded, by what a config says
quark.py         says what Quark of AMD stores
rules.py         recognises each kind of encoding by names, dtypes and shapes
scaled.py        recognises 8-bit values with scales
siblings.py      finds the tensors that belong together by their names
integers.py      recognises packed integers: compressed-tensors, GPTQ, AWQ, torchao and Quark
hqq.py           recognises weights of HQQ
bitnet.py        recognises weights of BitNet
bitsandbytes.py  recognises the weights of bitsandbytes, in 4 bits and in 8
cuts/            cuts tensors into pieces that can be decoded alone
types/           describes how tensors are decoded from others, a type for each encoding
"""
