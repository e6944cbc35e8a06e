"""Describes how tensors are decoded from others: a type for each encoding.

Every type is an `Encoding` of tensors.py.

scaled.py         FP8, MXFP8 and INT8 with scales, LLM.int8() of bitsandbytes, MXFP4 and NVFP4
integers.py       packed integers: compressed-tensors, GPTQ, AWQ and HQQ
ternary.py        weights of BitNet
gguf.py           blocks of llama.cpp
bitsandbytes.py   NF4 and FP4 of bitsandbytes
arranged.py       tensors that are cut out of others or put together from several
merged.py         tensors that adapters change
kinds.py          says what kind of quantization encoded a tensor
"""
