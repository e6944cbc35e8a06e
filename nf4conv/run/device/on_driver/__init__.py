"""Computes on an NVIDIA GPU without torch.

Importing torch takes longer than quantizing an 8B model. So the kernels of codec/kernels are
compiled once for a GPU, with torch and Triton at hand, and kept with their tables in bundles on
disk. Later runs load them with the few calls of the CUDA driver that they need, and touch their
first byte within a second. The bytes are those of on_torch/, because the kernels are
(tests/test_two_engines.py holds the two devices equal). What is packed transposed, joined from
several tensors, merged with an adapter or stored in float64 takes torch; so does what verification
does not find right at once.

driver.py           calls the CUDA driver: context, streams, memory, launches
bundle.py           keeps compiled kernels on disk
capability.py       tells which kernels a job takes, or why it takes torch
backend.py          is the GPU as all threads share it
device.py           is the GPU as one thread uses it
buffers.py          holds a thread's stream, and its buffers on both sides
batch_input.py      collects what a task brings to the GPU
sizes.py            computes bytes and places
decoding.py         decodes encoded tensors
loading.py          reads tensors, decodes and casts them
packing.py          packs weights to 4 bits
output_layout.py    divides a thread's output among the results of a batch
measuring.py        measures the errors of packed weights
convert.py          decodes and casts tensors that are kept
subtract.py         measures how far two tensors are apart
"""
