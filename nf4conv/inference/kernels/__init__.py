"""Kernels for products with packed weights and packed experts, in Triton."""
