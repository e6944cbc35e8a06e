"""Kernels that turn what is stored into floats.

dequantize.py  decodes packed codes with absmax, plain or nested
scaled.py      decodes 8-bit values with scales
fp4.py         decodes MXFP4 and NVFP4
integers.py    decodes packed integers of compressed-tensors, GPTQ and AWQ
halves.py      decodes weights of HQQ
ggml.py        decodes the blocks of llama.cpp's GGUF files
cast.py        casts values to another dtype
"""
