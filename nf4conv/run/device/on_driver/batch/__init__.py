"""Computes a batch of tensors in one thread: one upload, some launches, one download.

buffers.py      holds a thread's stream, and its buffers on both sides
input.py        collects what goes up
output.py       divides what comes down among the results
sizes.py        computes bytes and places
decoding.py     decodes encoded tensors
ggml.py         decodes tensors of GGUF files
integers.py     decodes packed integers
loading.py      reads tensors, decodes and casts them
packing.py      packs weights to 4 bits
measuring.py    measures the errors of packed weights
convert.py      decodes and casts tensors that are kept
subtract.py     measures how far two tensors are apart
"""
