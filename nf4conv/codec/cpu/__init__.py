"""The operations of `reference/` as a CPU does them fastest: the same bytes, many times sooner.

A chunk of blocks that fits the cache is worked on at a time. Counting the cuts below every element
takes 15 comparisons, which sounds slow and is not: numpy compares and adds a whole vector register
at once, about 0.06 ns a comparison, while any table lookup costs half a nanosecond an element.
torch does what numpy lacks: bfloat16, fast row maxima.

Nothing is flushed to zero here. Where that would matter, the block is *special*: its absmax is
outside a range in which no product can tell the difference, or is NaN or infinite. Special blocks,
and a partial last one, go to the reference.

A large weight is shared by several threads: numpy and torch let go of the interpreter lock while
they compute, and chunks are large enough for the lock to change hands seldom.
"""

from nf4conv.codec.cpu.dequantize import dequantize_blocks as dequantize_blocks
from nf4conv.codec.cpu.errors import error_sums as error_sums
from nf4conv.codec.cpu.quantize import quantize_blocks as quantize_blocks
from nf4conv.codec.reference.quantize import compress_absmax as compress_absmax
