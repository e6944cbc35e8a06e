"""Describes the tensors of a checkpoint: where their bytes are, and how they are decoded.

A tensor that is stored as it is has a dtype, a shape and a range of bytes. Any other tensor has an
encoding besides: one of the types of `Encoding`, which names the tensors that it is decoded from.
encodings/rules.py finds out which one. run/device/on_torch/reading.py and
run/device/on_driver/batch/loading.py read and decode it.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeAlias

from nf4conv.format.gguf import PLAIN
from nf4conv.format.layout import QUANT_STATE_PREFIX

DTYPE_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element by dtype tag: every tag that safetensors 0.8 knows."""

FileRange: TypeAlias = tuple[Path, int, int]  # (file, start, stop) in bytes

Parts: TypeAlias = tuple[tuple[str, "TensorInfo"], ...]
"""(role, tensor) of each tensor that an encoded one is decoded from. The first role is "values"."""


class TensorInfo(NamedTuple):
    """One tensor of a file, as its header describes it."""

    name: str  # key in the state dict
    dtype: str  # safetensors' dtype tag: "BF16", "F16", "F32", "F8_E4M3", "U8", …
    shape: tuple[int, ...]  # sizes, outermost first
    file: Path  # the file that holds it
    start: int  # where its bytes begin in that file, from the file's first byte
    stop: int  # where they end
    # None if the bytes are the elements in this dtype and shape. Otherwise file, start and stop are
    # those of the part that is read first: the largest one
    encoding: "Encoding | None" = None

    @property
    def file_range(self) -> FileRange:
        """Returns where the tensor's bytes are; of an encoded tensor, those of one part."""
        return self.file, self.start, self.stop

    @property
    def file_ranges(self) -> list[FileRange]:
        """Returns where the bytes of a tensor are that is stored as it is, or of some columns."""
        if isinstance(self.encoding, Columns):
            return self.encoding.file_ranges
        return [self.file_range]

    @property
    def nbytes(self) -> int:
        """Returns its bytes in the source; of an encoded tensor, those of all parts."""
        return self.stop - self.start if self.encoding is None else self.encoding.nbytes

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def files(self) -> set[Path]:
        """Returns the files that it is read from."""
        if self.encoding is None:
            return {self.file}
        found = set()
        for _, part in self.encoding.parts:
            found |= part.files
        return found

    @property
    def unmerged(self) -> "TensorInfo":
        """Returns the tensor that adapters are merged into; itself if there are none."""
        if isinstance(self.encoding, Merged):
            return self.encoding.base
        return self


class _EncodingBase:
    """Holds what all encodings share."""

    __slots__ = ()

    @property
    def parts(self) -> Parts:
        """Returns the tensors that are read to decode this one, with their roles."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all parts."""
        total = 0
        for _, part in self.parts:
            total += part.nbytes
        return total


@dataclass(frozen=True, slots=True)
class Scaled(_EncodingBase):
    """8-bit values times scales that blocks of them share: FP8, MXFP8, INT8."""

    name: ClassVar[str] = "scaled"

    values: TensorInfo  # [..., rows, columns]
    # one for all, one for each row, one for each block, or any shape that broadcasts against the
    # values'; None for values that were only cast
    scale: TensorInfo | None = None
    block: tuple[int, int] | None = None  # (rows, columns) that share a scale; None if shapes tell

    @property
    def parts(self) -> Parts:
        if self.scale is None:
            return (("values", self.values),)
        return ("values", self.values), ("scale", self.scale)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Scaled) and self.block == other.block


@dataclass(frozen=True, slots=True)
class Bitsandbytes8bit(_EncodingBase):
    """A weight of bitsandbytes' LLM.int8(): each row was scaled to a largest magnitude of 127."""

    name: ClassVar[str] = "int8 rows"

    values: TensorInfo  # [rows, columns] I8
    scale: TensorInfo  # [rows] or [rows, 1] F32: the largest magnitudes, bitsandbytes' SCB

    @property
    def parts(self) -> Parts:
        return ("values", self.values), ("scale", self.scale)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Bitsandbytes8bit)


@dataclass(frozen=True, slots=True)
class Fp4(_EncodingBase):
    """Pairs of E2M1 values times scales that groups of a row share: MXFP4 and NVFP4."""

    values: TensorInfo  # [rows, columns / 2], or a stack of such matrices
    scale: TensorInfo  # [rows, groups], or a stack of such matrices
    divisor: TensorInfo | None = None  # one value that all scales are divided by
    multiplier: TensorInfo | None = None  # one value that all scales are multiplied with
    # True if the matrices are stored as [out, in] and loaded as [in, out]: the experts of gpt-oss
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return "fp4 transposed" if self.is_transposed else "fp4"

    @property
    def parts(self) -> Parts:
        parts = [("values", self.values), ("scale", self.scale)]
        if self.divisor is not None:
            parts.append(("divisor", self.divisor))
        if self.multiplier is not None:
            parts.append(("multiplier", self.multiplier))
        return tuple(parts)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Fp4) and self.is_transposed == other.is_transposed


@dataclass(frozen=True, slots=True)
class PackedIntegers(_EncodingBase):
    """Integers of 2, 3, 4 or 8 bits, packed into words, times scales that groups of columns share.

    value = (code - zero) * scale. codec/decode/integers.py says how the codes lie in the words.
    """

    values: TensorInfo  # I32: [rows, words], [words, rows] of GPTQ, [columns, words] of AWQ
    scale: TensorInfo  # [rows, groups]; [groups, rows] of GPTQ and AWQ
    zeros: TensorInfo | None  # the zero points of the groups; None if all are 2^(bits - 1)
    group_index: TensorInfo | None  # [columns]: the group of each column; None if in order
    packing: str  # "compressed-tensors", "GPTQ" or "AWQ"
    bits: int
    columns: int  # of the weight as [rows, columns], that is, [out, in]
    group_size: int  # columns that share a scale, if they are in order
    zeros_less_one: bool = False  # True if the zero points are stored one too small: GPTQ's v1
    # True if the weight is [out, in] here and [in, out] in its family
    is_transposed: bool = False

    @property
    def name(self) -> str:
        groups = "by row" if self.group_size >= self.columns else f"groups of {self.group_size}"
        return f"{self.packing} {self.bits}-bit, {groups}"

    @property
    def parts(self) -> Parts:
        parts = [("values", self.values), ("scale", self.scale)]
        if self.zeros is not None:
            parts.append(("zeros", self.zeros))
        if self.group_index is not None:
            parts.append(("group_index", self.group_index))
        return tuple(parts)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, PackedIntegers)
            and self.packing == other.packing
            and self.bits == other.bits
            and self.columns == other.columns
            and self.group_size == other.group_size
            and self.zeros_less_one == other.zeros_less_one
            and self.is_transposed == other.is_transposed
        )


@dataclass(frozen=True, slots=True)
class HalfQuadratic(_EncodingBase):
    """A weight of HQQ: integers whose words hold codes of several parts of the weight.

    It is read as a whole, since its first rows and its last ones share words.
    """

    values: TensorInfo  # [words] U8, or I32 of 3 bits
    scale: TensorInfo  # one for each group
    zero: TensorInfo  # the zero point of each group
    bits: int  # of a code: 1, 2, 3, 4 or 8
    axis: int  # 1 if groups are runs of elements, 0 if their elements are at equal distances
    group_size: int

    @property
    def name(self) -> str:
        return f"HQQ {self.bits}-bit, groups of {self.group_size}"

    @property
    def parts(self) -> Parts:
        return ("values", self.values), ("scale", self.scale), ("zero", self.zero)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, HalfQuadratic)
            and self.bits == other.bits
            and self.axis == other.axis
            and self.group_size == other.group_size
        )


@dataclass(frozen=True, slots=True)
class Columns(_EncodingBase):
    """Some columns of a matrix that is stored as it is; only a part of another encoding."""

    name: ClassVar[str] = "columns"

    values: TensorInfo  # the whole matrix
    first: int
    last: int  # the column after the last one

    @property
    def parts(self) -> Parts:
        return (("values", self.values),)

    @property
    def file_ranges(self) -> list[FileRange]:
        """Returns where the columns are, row by row."""
        matrix = self.values
        rows, width = matrix.shape
        size = DTYPE_BITS[matrix.dtype] // 8
        ranges = []
        for row in range(rows):
            start = matrix.start + row * width * size
            ranges.append((matrix.file, start + self.first * size, start + self.last * size))
        return ranges

    @property
    def nbytes(self) -> int:
        rows = self.values.shape[0]
        return rows * (self.last - self.first) * DTYPE_BITS[self.values.dtype] // 8

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Columns)


@dataclass(frozen=True, slots=True)
class GgufBlocks(_EncodingBase):
    """A tensor of a GGUF file: blocks of llama.cpp, or values that its converter changed."""

    values: TensorInfo  # [..., bytes] U8: the blocks of each row; or [...] in its dtype
    block_type: (
        str  # as llama.cpp spells it; "F32", "F16" or "BF16" if the values are stored as such
    )
    changed: str | None = None  # what the converter did, a word of format/gguf.py
    heads: int = 0  # of the rows that it moved
    key_value_heads: int = 0

    @property
    def name(self) -> str:
        return f"GGUF {self.block_type}"

    @property
    def parts(self) -> Parts:
        return (("values", self.values),)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, GgufBlocks)
            and self.block_type == other.block_type
            and self.changed == other.changed
            and self.heads == other.heads
            and self.key_value_heads == other.key_value_heads
        )


@dataclass(frozen=True, slots=True)
class Bitsandbytes4bit(_EncodingBase):
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


@dataclass(frozen=True, slots=True)
class Strided(_EncodingBase):
    """A tensor that is cut out of a larger one, with steps between its elements."""

    name: ClassVar[str] = "strided"

    values: TensorInfo  # [n]: everything from the tensor's first element to its last
    strides: tuple[int, ...]  # elements of `values` from one index of each dimension to the next

    @property
    def parts(self) -> Parts:
        return (("values", self.values),)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Strided) and self.strides == other.strides


@dataclass(frozen=True, slots=True)
class Joined(_EncodingBase):
    """The rows of several tensors, encoded or not, one after the other."""

    name: ClassVar[str] = "joined"

    tensors: tuple[TensorInfo, ...]

    @property
    def parts(self) -> Parts:
        first, *others = self.tensors
        numbered = ((str(number), tensor) for number, tensor in enumerate(others, start=1))
        return ("values", first), *numbered

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Joined)


@dataclass(frozen=True, slots=True)
class Excerpt(_EncodingBase):
    """A run of the elements of a larger tensor, which is decoded for it."""

    name: ClassVar[str] = "cut out of a larger tensor"

    base: TensorInfo
    first: int  # how many elements of the base are before the run

    @property
    def parts(self) -> Parts:
        return (("values", self.base),)

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, Excerpt) and self.first == other.first


@dataclass(frozen=True, slots=True)
class StackedExperts(_EncodingBase):
    """Matrices of experts that are stored one by one, as the tensor that stacks them.

    The tensor is [experts, rows, columns], [experts · rows, columns], or [rows, columns] of a
    single expert; of biases it is [experts, elements].
    """

    name: ClassVar[str] = "stacked from single experts"

    # the projections of each expert, encoded or not: [out, in], or [out] of biases. The outputs of
    # several projections are fused
    experts: tuple[tuple[TensorInfo, ...], ...]
    is_transposed: bool = False  # True if the stack has [in, out] of each expert
    is_interleaved: bool = False  # True if the outputs of fused projections alternate

    @property
    def parts(self) -> Parts:
        matrices = [matrix for projections in self.experts for matrix in projections]
        numbered = [(str(number), matrix) for number, matrix in enumerate(matrices)]
        return ("values", matrices[0]), *numbered[1:]

    def decodes_like(self, other: "Encoding") -> bool:
        return isinstance(other, StackedExperts) and self == other


@dataclass(frozen=True, slots=True)
class Merged(_EncodingBase):
    """Another tensor, encoded or not, which adapters change."""

    name: ClassVar[str] = "merged with an adapter"

    base: TensorInfo  # the tensor that is changed, or a piece of it
    deltas: "tuple[Delta, ...]"  # the changes, in the order in which they are made
    first_row: int = 0  # how many rows of the whole tensor are before those of `base`

    @property
    def parts(self) -> Parts:
        return (("values", self.base),)

    def decodes_like(self, other: "Encoding") -> bool:
        return (
            isinstance(other, Merged)
            and self.deltas == other.deltas
            and self.first_row == other.first_row
        )

    @property
    def needs_all_rows(self) -> bool:
        """Returns True if a row of the result depends on other rows of the base."""
        for delta in self.deltas:
            if isinstance(delta, LowRankDelta) and delta.needs_all_rows:
                return True
        return False


Encoding: TypeAlias = (
    Scaled
    | Bitsandbytes8bit
    | Fp4
    | PackedIntegers
    | HalfQuadratic
    | Columns
    | GgufBlocks
    | Bitsandbytes4bit
    | Strided
    | Joined
    | Excerpt
    | StackedExperts
    | Merged
)
"""How a tensor is decoded from others.

Every type has a `name`, which reports show, and the method `decodes_like`: it returns True if parts
of equal layout and equal bytes decode to equal tensors.
"""


@dataclass(frozen=True, slots=True)
class LowRankDelta:
    """The addition of scale · up · down to a matrix, or to each matrix of a stack (LoRA).

    With a magnitude, every row is then scaled to a given norm (DoRA).
    """

    up: TensorInfo  # [out, rank], of several experts [out, rank · experts]: lora_B
    down: TensorInfo  # [rank, in], of several experts [experts · rank, in]: lora_A
    scale: float
    is_transposed: bool = False  # True if the tensor is [in, out]
    magnitude: TensorInfo | None = None  # [out]: the norms that DoRA gives the rows
    rows: tuple[int, int] | None = None  # rows of the product that are added; None for all
    row_step: int = 1  # distance between them
    experts: int = 0  # how many experts the factors stack; 0 if they are those of a single matrix
    expert: int | None = None  # which expert the tensor is; None if it is a stack of all of them
    # True if the columns of `up` are sorted by expert and then by rank; False if by rank first
    is_expert_major: bool = False

    @property
    def needs_all_rows(self) -> bool:
        """Returns True if a row of the result depends on other rows of the tensor."""
        return self.magnitude is not None and self.is_transposed


@dataclass(frozen=True, slots=True)
class VectorDelta:
    """The addition of scale · vector to a bias."""

    vector: TensorInfo  # of the shape of the bias
    scale: float


@dataclass(frozen=True, slots=True)
class RowsDelta:
    """New rows in the place of others: tokens that an adapter trained."""

    rows: TensorInfo  # [rows, columns]
    indices: tuple[int, ...]  # the row of the tensor that each of them replaces


Delta: TypeAlias = LowRankDelta | VectorDelta | RowsDelta
"""What an adapter does to a tensor."""


def is_in_4_bits(tensor: TensorInfo) -> bool:
    """Returns True if bitsandbytes packed the tensor, or what adapters are merged into."""
    return isinstance(tensor.unmerged.encoding, Bitsandbytes4bit)


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
        | GgufBlocks
        | Bitsandbytes4bit,
    )


def is_of_few_bits(tensor: TensorInfo) -> bool:
    """Returns True if the tensor, or what adapters are merged into, is of integers below 8 bits."""
    encoding = tensor.unmerged.encoding
    if isinstance(encoding, GgufBlocks):
        return encoding.block_type not in ("Q8_0", *PLAIN)
    return isinstance(encoding, PackedIntegers | HalfQuadratic) and encoding.bits < 8


def packed_in_order(tensor: TensorInfo) -> Bitsandbytes4bit | None:
    """Returns the encoding of a 4-bit weight whose codes stand in the order of its elements.

    Returns:
        The encoding; None for a weight that was packed transposed, and for any other tensor.
    """
    encoding = tensor.encoding
    if isinstance(encoding, Bitsandbytes4bit) and not encoding.is_transposed:
        return encoding
    return None
