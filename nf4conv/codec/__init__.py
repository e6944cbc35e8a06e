"""Tensors in, tensors out. Nothing here opens a file or knows of models and checkpoints.

The library:

    ops.py          quantizes and dequantizes tensors: validates, allocates, calls a backend
    linear.py       multiplies with packed weights
    linear_op.py    the same as operators of torch, for torch.compile and autograd
    linear_training.py  multiplies with gradients, without the operators
    linear_joining.py  joins products of the same x in graphs that torch.compile makes
    patching.py     makes the layers of bitsandbytes multiply so
    quant_state.py  turns a QuantState into the tensors that bitsandbytes stores, and back

The backends offer the same functions. All write into tensors that ops.py allocated; none validates.

    backends.py     chooses the backend by device
    reference/      defines every operation, in plain torch for any device
    cpu/            computes them as fast as a CPU can
    kernels/        computes them at the memory limit of an NVIDIA GPU, in Triton
    rounding/       rounds weights with knowledge of the activations that they multiply
    decode/         decodes the other quantizations that sources come in

Beside single weights:

    experts/        holds and decodes the experts of mixtures, many matrices as one

The arithmetic that all of them share:

    search.py       defines the search for better scales than absmax, and makes its tables
    reciprocal.py   gives 1 / x as the GPU does
    reduction.py    takes the mean as torch's CUDA kernel does: the offset of double quantization
    mean_order.py   divides that mean among threads, for the kernels too; imports no torch
    finite.py       tells whether scales are finite; imports no torch
    error_sums.py   states the bound that every packed value is held to, and what is measured
"""
