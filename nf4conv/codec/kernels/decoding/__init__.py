"""Kernels that turn what is stored into floats."""
