"""Says what kernels a program without torch and Triton takes for a purpose.

Each function returns a `Codec`. Its `device` is where the kernels will run; on a CPU they are for
Triton's interpreter, without inline assembly. compiling.py compiles them. Encodings in sources/
name the functions that decode them.
"""

from nf4conv.codec.kernels.ahead.codec import Codec as Codec
from nf4conv.codec.kernels.ahead.encoded import fp4_decoder as fp4_decoder
from nf4conv.codec.kernels.ahead.encoded import ggml_decoder as ggml_decoder
from nf4conv.codec.kernels.ahead.encoded import integer_decoder as integer_decoder
from nf4conv.codec.kernels.ahead.encoded import scaled_decoder as scaled_decoder
from nf4conv.codec.kernels.ahead.vectors import caster as caster
from nf4conv.codec.kernels.ahead.vectors import subtractor as subtractor
from nf4conv.codec.kernels.ahead.weights import comparer as comparer
from nf4conv.codec.kernels.ahead.weights import decoder as decoder
from nf4conv.codec.kernels.ahead.weights import encoder as encoder
