"""Presents weights that another quantization encoded as the float tensors that they stand for."""
