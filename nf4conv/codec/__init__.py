"""Tensors in, tensors out. No path is ever opened here, and nothing here knows of models or checkpoints.

    codebook.py     the code values and cut points, as bit patterns          (no torch)
    layout.py       what a 4-bit weight becomes on disk: names, sizes, JSON  (no torch)
    quant_state.py  QuantState ⇄ the tensors that bitsandbytes stores
    ops.py          the public functions: validate, allocate, choose the backend by device
    reference.py    plain torch, any device: the definition of every operation
    kernels/        Triton, CUDA: the same operations at the memory limit of the card

The two backends offer the same functions. Both write into tensors that ops.py allocated and neither validates.
"""
