"""Describes weights that bitsandbytes packed to NF4 or FP4."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from nf4conv.errors import CodecError, SourceError
from nf4conv.format import layout
from nf4conv.format.codebook import CODEBOOKS, NESTED_BLOCKSIZE
from nf4conv.format.dtypes import DTYPE_NAMES, STORAGE_DTYPES, TAGS
from nf4conv.format.layout import (
    QUANT_STATE_PREFIX,
    Format,
    block_count,
)
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import module_of
from nf4conv.sources.arranged import Excerpt
from nf4conv.sources.foreign.formats import Foreign, SiblingTensors, lacks, misfit
from nf4conv.sources.tensors import Encoding, Kernel, Parts, TensorInfo, cut_elements

_NESTED: Final = ("nested_absmax", "nested_quant_map")


@dataclass(frozen=True, slots=True)
class Bitsandbytes4bit(Foreign):
    """A weight that bitsandbytes packed to NF4 or FP4 (docs/format.md).

    The roles of the parts beside "values" are the suffixes of the components.
    """

    decoder: ClassVar[str] = "nf4conv.codec.decode.packed:decode_packed"

    values: TensorInfo  # the packed codes, in the dtype of quant_storage
    absmax: TensorInfo
    quant_map: TensorInfo | None  # None if the file lacks it; decoding does not need it
    nested_absmax: TensorInfo | None  # None without double quantization
    nested_quant_map: TensorInfo | None  # None without double quantization
    quant_state: TensorInfo  # the JSON blob
    quant_type: str  # "nf4" or "fp4"
    blocksize: int  # elements that share one absmax
    dtype: str  # tag of the values before they were packed
    # added to the decoded absmax; 0 without double quantization. The quant state has it, too
    nested_offset: float = field(compare=False)
    # True if the quant state has only the fields that bitsandbytes writes today: nothing but the
    # values above has to be known of it
    has_plain_state: bool = field(default=True, compare=False)
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
        found = []
        for role, part in super(Bitsandbytes4bit, self).parts:
            found.append((self.quant_state_role if role == "quant_state" else role, part))
        return tuple(found)

    @property
    def made_from(self) -> str:
        return f"bitsandbytes {self.format}"

    @property
    def format(self) -> Format:
        """Returns how the weight is packed; how its scales were chosen is not known here."""
        return Format(
            self.quant_type,
            self.blocksize,
            self.double_quant,
            DTYPE_NAMES[self.dtype],
            STORAGE_DTYPES.get(self.values.dtype, "uint8"),
        )

    @property
    def arguments(self) -> dict[str, Any]:
        return {}  # the parts say it all

    @classmethod
    def recognised(cls, tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
        """Recognises W, W.absmax, W.quant_state.bitsandbytes__nf4 and the like."""
        blobs = [f"{tensor.name}.{QUANT_STATE_PREFIX}{kind}" for kind in CODEBOOKS]
        found = [siblings.by_name[name] for name in blobs if name in siblings.by_name]
        if not found:
            return None
        parts: dict[str, TensorInfo | None] = {}
        for role in ("absmax", "quant_map", "nested_absmax", "nested_quant_map"):
            parts[role] = siblings.find(f"{tensor.name}.{role}")
        nested = (parts["nested_absmax"], parts["nested_quant_map"])
        for role in ("absmax",) if nested == (None, None) else ("absmax", *_NESTED):
            if parts[role] is None:
                raise lacks(tensor, role)
        if len(found) > 1:
            raise misfit(tensor, found[-1])
        fields = _read_fields(found[0], siblings)
        shape = tuple(fields["shape"])
        must_transpose = len(shape) == 2 and is_transposed(
            module_of(tensor.name), siblings.families
        )
        encoding = cls(
            values=tensor,
            **parts,  # type: ignore[arg-type]
            quant_state=found[0],
            quant_type=fields["quant_type"],
            blocksize=fields["blocksize"],
            dtype=TAGS[fields["dtype"]],
            nested_offset=0.0 if nested == (None, None) else float(fields["nested_offset"]),
            has_plain_state=fields.keys() <= {*layout.JSON_KEYS, *layout.NESTED_JSON_KEYS},
            is_transposed=must_transpose,
        )
        _check_fit(encoding, shape)
        if must_transpose:
            shape = shape[::-1]
        return tensor._replace(shape=shape, dtype=encoding.dtype, encoding=encoding)

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        if self.is_transposed or not self.has_plain_state:
            return None
        return Kernel("decoder", (self.quant_type, self.blocksize))

    def rows_together(self, tensor: TensorInfo) -> int | None:
        if self.is_transposed:
            return None
        together = self.blocksize * NESTED_BLOCKSIZE
        return together // math.gcd(together, max(tensor.shape[1], 1))

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        columns = tensor.shape[1]
        return self.run(start * columns, stop * columns)

    def run(self, start: int, stop: int) -> "Bitsandbytes4bit":
        """Returns the encoding of elements start … stop, multiples of 256 blocks or the end."""
        cut = cut_parts(dict(self.parts), self.blocksize, start, stop)
        return replace(
            self,
            values=cut["values"],
            absmax=cut["absmax"],
            nested_absmax=cut.get("nested_absmax"),
        )

    def is_stack(self, tensor: TensorInfo) -> bool:
        return not self.is_transposed

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        """Returns a matrix of a stack as a run of what is decoded: groups cross its borders."""
        size = math.prod(tensor.shape[1:])
        together = self.blocksize * NESTED_BLOCKSIZE
        start = index * size
        first = start - start % together
        last = min(start + size + -(start + size) % together, tensor.elements)
        run = tensor._replace(shape=(last - first,), encoding=self.run(first, last))
        return Excerpt(run, start - first)


def packed_in_order(tensor: TensorInfo) -> Bitsandbytes4bit | None:
    """Returns the encoding of a 4-bit weight whose codes stand in the order of its elements.

    Returns:
        The encoding; None for a weight that was packed transposed, and for any other tensor.
    """
    encoding = tensor.encoding
    if isinstance(encoding, Bitsandbytes4bit) and not encoding.is_transposed:
        return encoding
    return None


def packed_part(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Cuts a run of elements out of a weight that is packed in order; its shape becomes flat."""
    encoding = packed_in_order(tensor)
    assert encoding is not None
    return tensor._replace(shape=(stop - start,), encoding=encoding.run(start, stop))


def is_in_4_bits(tensor: TensorInfo) -> bool:
    """Returns True if bitsandbytes packed the tensor, or what adapters are merged into."""
    return isinstance(tensor.unmerged.encoding, Bitsandbytes4bit)


def packed_spans(elements: int, blocksize: int, most: int, unit: int = 1) -> list[tuple[int, int]]:
    """Divides the elements of a packed weight into runs that can be decoded one by one.

    Args:
        elements: how many the weight has.
        blocksize: elements that share one absmax.
        most: elements of a run at most; but a run has at least 256 blocks, which share one
            nested_absmax, and at least one unit.
        unit: every run begins at a multiple of so many elements.

    Returns:
        (start, stop) of each run, in elements.
    """
    together = math.lcm(unit, blocksize * NESTED_BLOCKSIZE)
    step = max(most - most % together, together)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def cut_parts(
    parts: Mapping[str, TensorInfo], blocksize: int, start: int, stop: int
) -> dict[str, TensorInfo]:
    """Cuts the parts of a packed weight to what decoding elements start … stop takes.

    Args:
        parts: the tensors of the weight by role: "values", and the suffixes of the components.
        blocksize: elements that share one absmax.
        start: the first element, a multiple of 256 blocks.
        stop: the element after the last one, a multiple of 256 blocks or the end of the weight.

    Returns:
        The parts by role. The values are bytes, whatever dtype they are stored in; the maps and the
        quant state stay whole.
    """
    first_block = start // blocksize
    last_block = block_count(stop, blocksize)
    found = dict(parts)
    found["values"] = cut_elements(parts["values"]._replace(dtype="U8"), start // 2, -(-stop // 2))
    if "absmax" in parts:
        found["absmax"] = cut_elements(parts["absmax"], first_block, last_block)
    if "nested_absmax" in parts:
        found["nested_absmax"] = cut_elements(
            parts["nested_absmax"],
            first_block // NESTED_BLOCKSIZE,
            block_count(last_block, NESTED_BLOCKSIZE),
        )
    return found


def _read_fields(blob: TensorInfo, siblings: SiblingTensors) -> dict[str, Any]:
    """Reads the JSON of a quant state; raises a SourceError if bitsandbytes could not read it."""
    where = f"{blob.file}: {blob.name}"
    if blob.dtype != "U8" or blob.nbytes > layout.LARGEST_QUANT_STATE:
        raise SourceError(f"{where}: {blob.nbytes:,} bytes of {blob.dtype} are no quant state")
    try:
        fields = layout.parse_quant_state(siblings.read(blob), may_say_more=True)
        if f"{_owner(blob)}.nested_absmax" in siblings.by_name:
            layout.nested_offset_of(fields)
    except CodecError as error:
        raise SourceError(f"{where}: not a quant state of bitsandbytes: {error}") from error
    if not blob.name.endswith(f".{QUANT_STATE_PREFIX}{fields['quant_type']}"):
        raise SourceError(f"{where}: its quant_type is {fields['quant_type']!r}")
    return fields


def _owner(component: TensorInfo) -> str:
    return component.name.partition(f".{QUANT_STATE_PREFIX}")[0]


def _check_fit(encoding: Bitsandbytes4bit, shape: tuple[int, ...]) -> None:
    """Raises a SourceError unless all parts have the dtypes and shapes that decoding takes."""
    values = encoding.values
    if values.dtype not in (*STORAGE_DTYPES, "I8"):
        raise misfit(values, encoding.quant_state)
    if -(-math.prod(shape) // 2) != values.nbytes:
        raise misfit(values, encoding.absmax)
    parts = dict(encoding.parts)
    # neither the quant type nor the dtype changes what is compared
    format = Format("nf4", encoding.blocksize, encoding.double_quant, "float32")
    for expected in layout.components(format, shape):
        if expected.suffix not in ("absmax", "nested_absmax", "nested_quant_map"):
            continue
        part = parts[expected.suffix]
        if part.dtype != expected.dtype or part.shape != expected.shape:
            raise misfit(values, part)
    quant_map = encoding.quant_map
    if quant_map is not None and quant_map.elements != 16:  # it is read, but not needed
        raise misfit(values, quant_map)
