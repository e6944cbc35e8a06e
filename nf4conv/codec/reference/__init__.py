"""Plain torch, any device: the definition of every operation, with the arithmetic of bitsandbytes'
CUDA kernels.

bitsandbytes' kernels are compiled with fast math, so every float32 operation flushes denormals to
zero, on input and output. For each block of a weight (docs/format.md says why each step is what it
is):

    absmax = largest |x|, starting at -FLT_MAX and ignoring NaN; elements past the end of the
             tensor count as 0
    r      = 1 / absmax, as reciprocal.py says; infinite for a block of zeros
    s      = x · r; NaN for a block of zeros
    code   = number of cuts below s; no cut is below NaN, which has code 0
    byte   = code of the even element · 16 + code of the odd one

No function here validates its arguments or allocates its results: ops.py does.
"""

from nf4conv.codec.reference.dequantize import dequantize_blocks as dequantize_blocks
from nf4conv.codec.reference.dequantize import error_sums as error_sums
from nf4conv.codec.reference.quantize import compress_absmax as compress_absmax
from nf4conv.codec.reference.quantize import quantize_blocks as quantize_blocks
