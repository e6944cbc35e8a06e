"""Decodes the blocks of llama.cpp's GGUF files, exactly as the Python package `gguf` does.

A block holds 32, 64 or 256 neighbouring values of a row: a scale in half precision, and codes of a
few bits. The layouts are those of ggml-common.h and ggml-quants.c in llama.cpp; every function
computes in float32, in the order of `gguf.quants` 0.20, so that no bit differs.

decoding.py  finds the decoder of a type, and decodes rows
bytes.py     takes numbers apart: fields of bits, halves, words
simple.py    decodes types with one scale for a block: Q4_0 … Q8_0, ternary, MXFP4, NVFP4, IQ4_NL
nested.py    decodes types whose blocks have quantized scales: Q2_K … Q6_K, IQ4_XS
undoing.py   undoes what llama.cpp's converter did to weights
grids.py     decodes types whose codes are points of a grid: IQ1, IQ2, IQ3
grids.json   holds the points
"""
