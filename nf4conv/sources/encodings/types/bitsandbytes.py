"""Describes weights that bitsandbytes packed to NF4 or FP4."""

from dataclasses import dataclass

from nf4conv.format.layout import QUANT_STATE_PREFIX
from nf4conv.sources.tensors import Encoding, Parts, TensorInfo


@dataclass(frozen=True, slots=True)
class Bitsandbytes4bit(Encoding):
    """A weight that bitsandbytes packed to NF4 or FP4 (docs/format.md).

    The roles of the parts beside "values" are the suffixes of the components.
    """

    values: TensorInfo  # the packed codes, in the dtype of quant_storage
    absmax: TensorInfo
    quant_map: TensorInfo | None  # None if the file lacks it; decoding does not need it
    nested_absmax: TensorInfo | None  # None without double quantization
    nested_quant_map: TensorInfo | None  # None without double quantization
    quant_state: TensorInfo  # the JSON blob
    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # elements that share one absmax
    dtype: str  # tag of the values before they were packed
    nested_offset: float  # added to the decoded absmax; 0 without double quantization
    # True if the quant state has only the fields that bitsandbytes writes today: nothing but the
    # values above has to be known of it
    has_plain_state: bool = True
    # True if the weight was packed as [out, in] for a family that stores its weights as [in, out]
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return "bitsandbytes 4-bit transposed" if self.is_transposed else "bitsandbytes 4-bit"

    @property
    def double_quant(self) -> bool:
        return self.nested_absmax is not None

    @property
    def quant_state_role(self) -> str:
        """Returns the suffix of the JSON blob, which names the quant type."""
        return f"{QUANT_STATE_PREFIX}{self.quant_type}"

    @property
    def parts(self) -> Parts:
        parts = [("values", self.values), ("absmax", self.absmax)]
        if self.quant_map is not None:
            parts.append(("quant_map", self.quant_map))
        if self.nested_absmax is not None:
            parts.append(("nested_absmax", self.nested_absmax))
        if self.nested_quant_map is not None:
            parts.append(("nested_quant_map", self.nested_quant_map))
        parts.append((self.quant_state_role, self.quant_state))
        return tuple(parts)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, Bitsandbytes4bit)
            and self.quant_type == other.quant_type
            and self.blocksize == other.blocksize
            and self.dtype == other.dtype
            and self.is_transposed == other.is_transposed
        )


def packed_in_order(tensor: TensorInfo) -> Bitsandbytes4bit | None:
    """Returns the encoding of a 4-bit weight whose codes stand in the order of its elements.

    Returns:
        The encoding; None for a weight that was packed transposed, and for any other tensor.
    """
    encoding = tensor.encoding
    if isinstance(encoding, Bitsandbytes4bit) and not encoding.is_transposed:
        return encoding
    return None


def is_in_4_bits(tensor: TensorInfo) -> bool:
    """Returns True if bitsandbytes packed the tensor, or what adapters are merged into."""
    return isinstance(tensor.unmerged.encoding, Bitsandbytes4bit)
