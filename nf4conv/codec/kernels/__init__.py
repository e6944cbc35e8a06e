"""The Triton backend: the operations of `reference.py` at the memory limit of the card, for CUDA
tensors.

    arithmetic.py   the float32 operations as bitsandbytes' CUDA library rounds and flushes them
    tables.py       the small tables that kernels read, once for each device
    assembly.py     the two hot loops as PTX
    launch.py       compile once, then launch for the price of the driver call
    quantize.py     weight → packed codes, absmax
    search.py       weight → packed codes, searched scales
    nested.py       absmax → 8-bit codes
    pack.py         the launches of these three, for one tensor or for many; whether any value is NaN or infinite
    dequantize.py   packed codes, absmax (plain or nested) → weight
    mean.py         the mean that the nested step subtracts, in torch's order
    ahead.py        compiled kernels as bytes, for programs without torch
    error.py        weight, packed codes → error sums, nothing materialised
    product.py      x, packed codes, absmax → product; its PTX is in product_assembly.py, its launches in matmul.py
    scaled.py       8-bit values, scales → weight
    fp4.py          MXFP4 and NVFP4 → weight
    cast.py         values → another dtype

Functions write into the tensors they are given, launch on the calling thread's current stream and
validate nothing. Each kernel has a constexpr `PTX`: where it is false, every step in inline
assembly is replaced by plain Triton, which is how Triton's interpreter runs the same indexing,
masks and packing without a GPU. product.py has none: a test runs its PTX.
"""

from nf4conv.codec.kernels import matmul as matmul
from nf4conv.codec.kernels.dequantize import dequantize_blocks as dequantize_blocks
from nf4conv.codec.kernels.error import error_sums as error_sums
from nf4conv.codec.kernels.nested import compress_absmax as compress_absmax
from nf4conv.codec.kernels.pack import quantize_blocks as quantize_blocks
from nf4conv.codec.kernels.pack import search_blocks as search_blocks
