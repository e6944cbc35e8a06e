"""Says of a tensor what kind of quantization encoded it, if any did."""

from nf4conv.format.gguf import PLAIN
from nf4conv.sources.encodings.types.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.encodings.types.gguf import GgufBlocks
from nf4conv.sources.encodings.types.integers import HalfQuadratic, PackedIntegers
from nf4conv.sources.encodings.types.scaled import Bitsandbytes8bit, Fp4, Scaled
from nf4conv.sources.encodings.types.ternary import Ternary
from nf4conv.sources.tensors import TensorInfo


def is_quantized(tensor: TensorInfo) -> bool:
    """Returns True if a quantization encoded the tensor, or what adapters are merged into."""
    encoding = tensor.unmerged.encoding
    return isinstance(
        encoding,
        Scaled
        | Bitsandbytes8bit
        | Fp4
        | PackedIntegers
        | HalfQuadratic
        | Ternary
        | GgufBlocks
        | Bitsandbytes4bit,
    )


def is_of_few_bits(tensor: TensorInfo) -> bool:
    """Returns True if the tensor, or what adapters are merged into, is of integers below 8 bits."""
    encoding = tensor.unmerged.encoding
    if isinstance(encoding, GgufBlocks):
        return encoding.block_type not in ("Q8_0", *PLAIN)
    return isinstance(encoding, PackedIntegers | HalfQuadratic | Scaled) and encoding.bits < 8
