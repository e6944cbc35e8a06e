"""The Triton backend: the operations of `reference/` at the memory limit of an NVIDIA GPU."""

from nf4conv.codec.kernels.decoding.dequantize import dequantize_blocks as dequantize_blocks
from nf4conv.codec.kernels.error import error_sums as error_sums
from nf4conv.codec.kernels.packing.nested import compress_absmax as compress_absmax
from nf4conv.codec.kernels.packing.pack import quantize_blocks as quantize_blocks
