"""The engine on an NVIDIA GPU without torch: packing, unpacking, proving and comparing weights,
encoded, cast or not.

Importing torch takes longer than quantizing an 8B model. So the kernels of codec/kernels are
compiled once for a GPU, with torch and Triton at hand, and kept with their tables in bundles on
disk; later runs load them with the few calls of the CUDA driver that they need, and touch their
first byte within a second. The bytes are those of with_torch/, because the kernels are
(tests/test_two_engines.py holds the two engines equal). What is packed transposed, or joined from
several tensors, and float64, take torch; so does what verification does not find right at once.

    driver.py   the CUDA driver API: context, streams, memory, launches
    bundle.py   compiled kernels on disk
    worker.py   the engine, and a thread's stream and buffers on both sides
    reading.py  tensors brought to the device, and decoded and cast there
    pack.py     weights → 4 bits
    convert.py  4 bits → weights; whatever else is kept, but decoded or cast
    proof.py    what is stored against what pack.py makes
    difference.py   how far values are apart
"""
