"""Decodes tensors that another quantization encoded: by torch, on any device.

What converts checkpoints on a GPU has kernels instead (codec/kernels/decoding/).
sources/foreign/ describes the encodings and names the decoders, which
run/device/on_torch/reading.py calls.
"""
