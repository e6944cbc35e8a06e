"""Tensors in, tensors out. No path is ever opened here, and nothing here knows of models or
checkpoints.

    quant_state.py  QuantState ⇄ the tensors that bitsandbytes stores
    ops.py          the public functions: validate, allocate, choose the backend by device
    search.py       the search for better scales than absmax: its definition, and its tables
    reference.py    plain torch, any device: the definition of every operation
    reciprocal.py   1 / x as the GPU gives it
    reduction.py    the mean in the order of torch's CUDA kernel: the offset of double quantization
    error_sums.py   what one pass over a weight and its packed form can say, and the bound it is held to
    mean_order.py   that order, for the kernels too                          (no torch)
    cpu.py          the operations as fast as a CPU does them; the errors in cpu_errors.py, the search in cpu_search.py
    kernels/        Triton, CUDA: the operations at the memory limit of the card
    decode/         what other quantizations encoded → floats

The three backends offer the same functions. All write into tensors that ops.py allocated and none
validates.
"""
