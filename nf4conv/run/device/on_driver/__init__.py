"""Computes on an NVIDIA GPU without torch.

Importing torch takes longer than quantizing an 8B model. So the kernels of codec/kernels are
compiled once for a GPU, with torch and Triton at hand, and kept with their tables in bundles on
disk. Later runs load them with the few calls of the CUDA driver that they need, and touch their
first byte within a second. The bytes are those of on_torch/, because the kernels are
(tests/run/test_two_engines.py holds the two devices equal). What is packed transposed, joined from
several tensors, merged with an adapter or stored in float64 takes torch; so does what verification
does not find right at once.

driver.py       calls the CUDA driver: context, streams, memory, launches
kernels.py      names kernels, and loads compiled ones
bundle.py       keeps compiled kernels on disk
compiling.py    compiles kernels, once for a GPU
capability.py   tells which kernels a job takes, or why it takes torch
gpu.py          holds the kernels and the memory that all threads share
backend.py      is the GPU as a run sees it
device.py       is the GPU as one thread uses it
batch/          holds what one thread does for a batch of tensors
"""
