"""Kernels that decode the blocks of llama.cpp's GGUF files.

Every function takes the address of the block that a value is in and the value's place there, and
returns the value in float32. The layouts and the arithmetic are those of codec/decode/ggml/, step
by step, so that no bit differs. Types are told apart by their numbers in ggml.h.

decoding.py  decodes a matrix: one pass, one launch
bytes.py     loads bytes and numbers out of blocks
simple.py    decodes types with one scale for a block: Q4_0 … Q8_0, ternary, MXFP4, NVFP4, IQ4_NL
nested.py    decodes types whose blocks have quantized scales: Q2_K … Q6_K, IQ4_XS
grids.py     decodes types whose codes are points of a grid: IQ1, IQ2, IQ3
"""
