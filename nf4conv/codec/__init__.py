"""Tensors in, tensors out. No path is ever opened here, and nothing here knows of models or checkpoints.

    codebook.py     the code values and cut points, as bit patterns          (no torch)
    layout.py       what a 4-bit weight becomes on disk: names, sizes, JSON  (no torch)
    quant_state.py  QuantState ⇄ the tensors that bitsandbytes stores
    ops.py          the public functions: validate, allocate, choose the backend by device
    reference.py    plain torch, any device: the definition of every operation
    reduction.py    the mean in the order of torch's CUDA kernel: the offset of double quantization
    error_sums.py   what one pass over a weight and its packed form can say, and the bound it is held to
    cpu.py          the same operations as fast as a CPU does them
    kernels/        Triton, CUDA: the same operations at the memory limit of the card

The three backends offer the same functions. All write into tensors that ops.py allocated and none validates.
"""
