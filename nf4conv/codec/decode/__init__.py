"""Decodes tensors that another quantization encoded: by torch, on any device.

The engine on the CUDA driver has kernels instead (codec/kernels/decoding/).
sources/foreign/ describes the encodings and names the decoders, which
run/device/on_torch/reading.py calls.
"""
