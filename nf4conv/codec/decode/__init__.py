"""Decodes tensors that another quantization encoded: by Triton on a GPU, by torch elsewhere.

sources/foreign/ describes the encodings and names the decoders, which
run/device/on_torch/reading.py calls.
"""
