"""Computes on an NVIDIA GPU without torch.

Importing torch takes longer than quantizing an 8B model. So the kernels of codec/kernels are
compiled once for a GPU, with torch and Triton at hand, and kept with their tables in bundles on
disk. Later runs load them with the few calls of the CUDA driver that they need, and touch their
first byte within a second. The bytes are those of on_torch/, because the kernels are
(tests/run/test_two_engines.py holds the two devices equal). A run takes torch as a whole if one
tensor is packed transposed, joined from several, merged with an adapter or stored in float64; so
does what verification does not find right at once.
"""
