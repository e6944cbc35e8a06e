"""The Triton backend: the operations of `reference/` at the memory limit of the card, for CUDA
tensors.

    packing/        weight → packed codes, absmax and the codes of absmax
    decoding/       packed codes and other encodings → floats
    rounding/       weights and second moments of their inputs → codes and scales
    product/        x, packed codes, absmax → x · Wᵀ
    experts/        products with the experts of mixtures, and decoding of those that are used
    ahead/          says what kernels programs without torch take
    error.py        compares a weight with its packed codes; nothing is materialised
    difference.py   compares two vectors
    slots.py        reads weights and packed codes, 16 bytes of weight at a time
    arithmetic.py   rounds and flushes float32 operations as bitsandbytes' CUDA library does
    assembly.py     holds the hot loops as PTX
    tables.py       makes the small tables that kernels read, once for each device
    capturing.py    does what a CUDA graph may not record
    launch.py       compiles once, then launches for the price of the driver call
    compiling.py    compiles kernels to machine code, for these programs

Functions write into the tensors they are given, launch on the calling thread's current stream and
validate nothing. Each kernel has a constexpr `PTX`: where it is false, plain Triton replaces every
step in inline assembly. That is how Triton's interpreter runs the same indexing, masks and packing
without a GPU. product/ has none: a test runs its PTX.
"""

from nf4conv.codec.kernels.decoding.dequantize import dequantize_blocks as dequantize_blocks
from nf4conv.codec.kernels.error import error_sums as error_sums
from nf4conv.codec.kernels.packing.nested import compress_absmax as compress_absmax
from nf4conv.codec.kernels.packing.pack import quantize_blocks as quantize_blocks
from nf4conv.codec.kernels.packing.pack import search_blocks as search_blocks
