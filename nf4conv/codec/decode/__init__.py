"""Decodes tensors that another quantization encoded: by Triton on a GPU, by torch elsewhere.

sources/encodings/types/ describes the encodings; run/device/on_torch/reading.py calls the decoders.
"""
