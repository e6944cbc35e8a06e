"""Quantizing, and back, on an NVIDIA GPU without torch: what the commands use when tensors need no cast.

Importing torch takes longer than quantizing an 8B model. So the kernels of codec/kernels are compiled once for a GPU,
with torch and Triton at hand, and kept with their tables in a bundle on disk; later runs load it with the few calls of
the CUDA driver that they need, and touch their first byte within a second. The bytes are the same: they are the same
kernels (tests/test_gpu.py holds the two ways equal).

    driver.py   the CUDA driver API through ctypes: context, streams, memory, launches
    bundle.py   compiled kernels on disk
    engine.py   a worker with a stream and its buffers on both sides
    encode.py   its tasks of quantizing: the counterpart of nf4conv/encode.py
    decode.py   its tasks of dequantizing: the counterpart of nf4conv/decode.py
"""
