"""Describes weights that bitsandbytes packed to NF4 or FP4."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

from nf4conv.errors import CodecError, SourceError
from nf4conv.format import layout
from nf4conv.format.codebook import NESTED_BLOCKSIZE
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
        return _recognised(tensor, siblings)

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


_STORAGE_DTYPES: Final = ("U8", "I8", "BF16", "F16", "F32")
"""Dtypes that packed codes may be stored in (quant_storage)."""


@dataclass(frozen=True)
class _QuantState:
    """The fields of a quant state that decoding needs."""

    quant_type: str  # "nf4" or "fp4"
    shape: tuple[int, ...]  # of the weight before it was packed
    dtype: str  # tag of the weight before it was packed
    blocksize: int  # elements that share one absmax
    nested_offset: float  # 0 without double quantization
    is_plain: bool  # False if there are fields that bitsandbytes does not write today


def _recognised(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight in 4 bits: W, W.absmax, W.quant_state.bitsandbytes__nf4 and the like."""
    components: dict[str, TensorInfo] = {}
    for suffix in layout.COMPONENT_SUFFIXES:
        part = siblings.find(f"{tensor.name}.{suffix}")
        if part is not None:
            components[suffix] = part
    blobs = []
    for suffix, part in components.items():
        if suffix.startswith(layout.QUANT_STATE_PREFIX):
            blobs.append(part)
    if not blobs:
        return None
    blob = blobs[-1]
    is_nested = "nested_absmax" in components or "nested_quant_map" in components
    _check_complete(tensor, components, is_nested)
    if len(blobs) > 1 or tensor.dtype not in _STORAGE_DTYPES:
        raise misfit(tensor, blob)
    state = _read_quant_state(blob, siblings, is_nested)
    weight = tensor._replace(shape=state.shape, dtype=state.dtype)
    if -(-weight.elements // 2) != tensor.nbytes:
        raise misfit(tensor, components["absmax"])
    _check_components(tensor, components, state, is_nested)
    must_transpose = len(state.shape) == 2 and is_transposed(
        module_of(tensor.name), siblings.families
    )
    encoding = Bitsandbytes4bit(
        values=tensor,
        absmax=components["absmax"],
        quant_map=components.get("quant_map"),
        nested_absmax=components.get("nested_absmax"),
        nested_quant_map=components.get("nested_quant_map"),
        quant_state=blob,
        quant_type=state.quant_type,
        blocksize=state.blocksize,
        dtype=state.dtype,
        nested_offset=state.nested_offset,
        has_plain_state=state.is_plain,
        is_transposed=must_transpose,
    )
    shape = state.shape
    if must_transpose:
        shape = shape[::-1]
    return weight._replace(shape=shape, encoding=encoding)


def _check_complete(
    tensor: TensorInfo, components: Mapping[str, TensorInfo], is_nested: bool
) -> None:
    """Raises a SourceError if a weight lacks a component that decoding takes."""
    needed = ["absmax"]
    if is_nested:
        needed += ["nested_absmax", "nested_quant_map"]
    for suffix in needed:
        if suffix not in components:
            raise lacks(tensor, suffix)


def _check_components(
    tensor: TensorInfo,
    components: Mapping[str, TensorInfo],
    state: _QuantState,
    is_nested: bool,
) -> None:
    """Raises a SourceError if a component has not the dtype and shape that the weight requires."""
    # neither the quant type nor the dtype changes what is compared
    format = layout.Format("nf4", state.blocksize, is_nested, "float32")
    for expected in layout.components(format, state.shape):
        if expected.suffix not in ("absmax", "nested_absmax", "nested_quant_map"):
            continue
        part = components[expected.suffix]
        if part.dtype != expected.dtype or part.shape != expected.shape:
            raise misfit(tensor, part)
    quant_map = components.get("quant_map")
    if quant_map is not None and quant_map.elements != 16:  # it is read, but not needed
        raise misfit(tensor, quant_map)


def _read_quant_state(blob: TensorInfo, siblings: SiblingTensors, is_nested: bool) -> _QuantState:
    """Reads the JSON blob of a weight; raises a SourceError if bitsandbytes could not read it."""
    where = f"{blob.file}: {blob.name}"
    if blob.dtype != "U8" or blob.nbytes > layout.LARGEST_QUANT_STATE:
        raise SourceError(f"{where}: {blob.nbytes:,} bytes of {blob.dtype} are no quant state")
    nested_offset = 0.0
    try:
        fields = layout.parse_quant_state(siblings.read(blob), may_say_more=True)
        if is_nested:
            nested_offset = layout.nested_offset_of(fields)
    except CodecError as error:
        raise SourceError(f"{where}: not a quant state of bitsandbytes: {error}") from error
    quant_type = fields["quant_type"]
    if not blob.name.endswith(f".{layout.QUANT_STATE_PREFIX}{quant_type}"):
        raise SourceError(f"{where}: its quant_type is {quant_type!r}")
    return _QuantState(
        quant_type=quant_type,
        shape=tuple(fields["shape"]),
        dtype=TAGS[fields["dtype"]],
        blocksize=fields["blocksize"],
        nested_offset=nested_offset,
        is_plain=fields.keys() <= {*layout.JSON_KEYS, *layout.NESTED_JSON_KEYS},
    )
