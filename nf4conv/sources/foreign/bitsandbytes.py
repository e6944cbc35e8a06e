"""Describes weights that bitsandbytes packed to NF4 or FP4, and finds what is wrong with them.

The faults are written against the format (docs/format.md), not against the code that writes the
format. Those that other tools are known to make are named.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar, Final, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.format import layout
from nf4conv.format.codebook import CODEBOOKS, DYNAMIC_MAP, NESTED_BLOCKSIZE
from nf4conv.format.dtypes import STORAGE_DTYPES, TAGS
from nf4conv.format.layout import (
    COMPONENT_SUFFIXES,
    QUANT_STATE_PREFIX,
    Format,
    StateFields,
    block_count,
)
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import module_of
from nf4conv.sources.arranged import Excerpt
from nf4conv.sources.foreign.formats import Foreign, Part, SiblingTensors
from nf4conv.sources.foreign.formats import part as described
from nf4conv.sources.tensors import Encoding, Kernel, TensorInfo, cut_elements

_CLOSE: Final = 2**-8
"""Relative distance at which a code map still passes for the standard one, made in bfloat16.

Kernels decode with the standard map.
"""

_NEARLY_EQUAL: Final = 2**-21
"""Relative distance of a dynamic map that was made on a machine without fused multiply-add
(docs/format.md).
"""


@dataclass(frozen=True, slots=True)
class Bitsandbytes4bit(Foreign):
    """A weight that bitsandbytes packed to NF4 or FP4 (docs/format.md)."""

    layout: ClassVar[Mapping[str, Part]] = {
        "values": described("", f"I8 {' '.join(STORAGE_DTYPES)}:")
    }
    ends: ClassVar[tuple[str, ...]] = tuple(f".{suffix}" for suffix in COMPONENT_SUFFIXES)
    decoder: ClassVar[str] = "nf4conv.codec.ops:decode_packed"

    values: TensorInfo  # the packed codes, in the dtype of quant_storage; named as the weight
    absmax: TensorInfo
    quant_map: TensorInfo | None  # None if the file lacks it; decoding does not need it
    nested_absmax: TensorInfo | None  # None without double quantization
    nested_quant_map: TensorInfo | None  # None without double quantization
    quant_state: TensorInfo | None  # the JSON blob; None if it is not on disk
    format: Format  # the files of other tools do not tell its scales
    shape: tuple[int, ...]  # of the weight before it was packed
    nested_offset: float | None  # added to the decoded absmax; None without double quantization
    # the JSON of the quant state that is to be written, or has no place on disk yet
    blob: bytes | None = None
    # True if the weight was packed as [out, in] for a family that stores its weights as [in, out]
    is_transposed: bool = False

    @property
    def name(self) -> str:
        return "bitsandbytes 4-bit transposed" if self.is_transposed else "bitsandbytes 4-bit"

    @property
    def made_from(self) -> str:
        return f"bitsandbytes {self.format}"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "quant_type": self.format.quant_type,
            "blocksize": self.format.blocksize,
            "nested_offset": self.nested_offset,
        }

    @classmethod
    def recognised(cls, tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
        """Recognises W, W.absmax, W.quant_state.bitsandbytes__nf4 and the like."""
        components = layout.parts_of(tensor.name, siblings.by_name)
        if not any(suffix.startswith(QUANT_STATE_PREFIX) for suffix in components):
            return None
        encoding, faults = read_weight(tensor, components, siblings.read)
        if encoding is None:
            fault = next(fault for fault in faults if fault.severity is Severity.FATAL)
            raise SourceError.about(fault.part.file, fault.part.name, fault.text)
        shape = encoding.shape
        if len(shape) == 2 and is_transposed(module_of(tensor.name), siblings.families):
            shape = shape[::-1]
            encoding = replace(encoding, is_transposed=True)
        return tensor._replace(shape=shape, dtype=TAGS[encoding.format.dtype], encoding=encoding)

    def kernel(self, tensor: TensorInfo) -> Kernel | None:
        if self.is_transposed:
            return None
        return Kernel("decoder", (self.format.quant_type, self.format.blocksize))

    def rows_together(self, tensor: TensorInfo) -> int | None:
        if self.is_transposed:
            return None
        together = self.format.blocksize * NESTED_BLOCKSIZE
        return together // math.gcd(together, max(tensor.shape[1], 1))

    def rows(self, tensor: TensorInfo, start: int, stop: int) -> Encoding:
        columns = tensor.shape[1]
        return self.run(start * columns, stop * columns)

    def run(self, start: int, stop: int) -> "Bitsandbytes4bit":
        """Returns the encoding of elements start … stop, multiples of 256 blocks or the end."""
        cut = cut_parts(dict(self.parts), self.format.blocksize, start, stop)
        return replace(
            self,
            values=cut["values"],
            absmax=cut["absmax"],
            nested_absmax=cut.get("nested_absmax"),
            shape=(stop - start,),
        )

    def is_stack(self, tensor: TensorInfo) -> bool:
        return not self.is_transposed

    def matrix(self, tensor: TensorInfo, index: int) -> Encoding:
        """Returns a matrix of a stack as a run of what is decoded: groups cross its borders."""
        size = math.prod(tensor.shape[1:])
        together = self.format.blocksize * NESTED_BLOCKSIZE
        start = index * size
        first = start - start % together
        last = min(start + size + -(start + size) % together, tensor.elements)
        run = tensor._replace(shape=(last - first,), encoding=self.run(first, last))
        return Excerpt(run, start - first)


def packed_in_order(tensor: TensorInfo) -> Bitsandbytes4bit | None:
    """Returns the encoding of a 4-bit weight whose codes stand in the order of its elements; None
    for one that was packed transposed, and for any other tensor.
    """
    encoding = tensor.encoding
    if isinstance(encoding, Bitsandbytes4bit) and not encoding.is_transposed:
        return encoding
    return None


def is_in_4_bits(tensor: TensorInfo) -> bool:
    """Returns True if bitsandbytes packed the tensor, or what adapters are merged into."""
    return isinstance(tensor.unmerged.encoding, Bitsandbytes4bit)


def packed_spans(elements: int, blocksize: int, most: int, unit: int = 1) -> list[tuple[int, int]]:
    """Divides the elements of a packed weight into runs, (start, stop), that can be decoded one by
    one.

    A run has at most `most` elements, but at least one `unit`, at a multiple of which it begins,
    and 256 blocks, which share one nested_absmax.
    """
    together = math.lcm(unit, blocksize * NESTED_BLOCKSIZE)
    step = max(most - most % together, together)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def cut_parts(
    parts: Mapping[str, TensorInfo], blocksize: int, start: int, stop: int
) -> dict[str, TensorInfo]:
    """Cuts the parts of a packed weight, by role, to what decoding elements start … stop takes:
    multiples of 256 blocks, or the end.

    The values become bytes, whatever dtype they are stored in; the maps and the quant state stay
    whole.
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


class Severity(IntEnum):
    """Tells what a fault of a packed weight means for those that read it."""

    NOTE = 0  # worth knowing, no fault
    REPAIRED = 1  # a fault of what is written anew where the weight is copied
    LASTING = 2  # a fault that a copy would have too
    FATAL = 3  # the weight cannot be decoded


class WeightFault(NamedTuple):
    """Something that is wrong with a packed weight, or worth knowing."""

    check: str  # of report/measured.py
    part: TensorInfo  # the tensor that it concerns
    text: str  # what was found, and what was expected
    severity: Severity


def check_weight(
    values: TensorInfo,
    components: Mapping[str, TensorInfo],
    read: Callable[[TensorInfo], bytes],
    scales: str = "absmax",
) -> tuple[Bitsandbytes4bit | None, list[WeightFault]]:
    """Finds all that is wrong with a packed weight; arguments and result as of `read_weight`."""
    found = []
    for part in components.values():
        if part.file != values.file:
            text = (
                f"is apart from its weight in {values.file.name}; transformers 4.53 … 4.56 and "
                f"diffusers then fail"
            )
            found.append(WeightFault("one shard", part, text, Severity.REPAIRED))
    weight, faults = read_weight(values, components, read, scales)
    found += faults
    for quant_type, book in CODEBOOKS.items():
        if f"{QUANT_STATE_PREFIX}{quant_type}" in components:
            found += _map_faults(components.get("quant_map"), book.values, quant_type, read)
    nested = components.get("nested_quant_map")
    return weight, [*found, *_map_faults(nested, DYNAMIC_MAP, "the dynamic map", read)]


def read_weight(
    values: TensorInfo,
    components: Mapping[str, TensorInfo],
    read: Callable[[TensorInfo], bytes],
    scales: str = "absmax",
) -> tuple[Bitsandbytes4bit | None, list[WeightFault]]:
    """Describes a packed weight, given its codes and the tensors beside them by suffix.

    Returns the weight, None if a fault is fatal; and the faults of all but the code maps' values.
    """
    faults = list(_lacking(values, components))
    if any(fault.severity is Severity.FATAL for fault in faults):
        return None, faults
    [state] = [suffix for suffix in components if suffix.startswith(QUANT_STATE_PREFIX)]
    fields, of_state = _read_state(components[state], state, components, read, scales)
    faults += of_state
    if fields is None:
        return None, faults
    weight = described_weight(values, components, fields, scales)
    faults += _layout_faults(weight, components)
    if any(fault.severity is Severity.FATAL for fault in faults):
        return None, faults
    return weight, faults


def described_weight(
    values: TensorInfo, components: Mapping[str, TensorInfo], fields: StateFields, scales: str
) -> Bitsandbytes4bit:
    """Returns a weight of which all is known; its quant state need not be among the components."""
    storage = STORAGE_DTYPES.get(values.dtype, "uint8")
    return Bitsandbytes4bit(
        values=values,
        absmax=components["absmax"],
        quant_map=components.get("quant_map"),
        nested_absmax=components.get("nested_absmax"),
        nested_quant_map=components.get("nested_quant_map"),
        quant_state=components.get(f"{QUANT_STATE_PREFIX}{fields.format.quant_type}"),
        format=replace(fields.format, quant_storage=storage, scales=scales),
        shape=fields.shape,
        nested_offset=fields.nested_offset,
    )


def as_written_anew(weight: Bitsandbytes4bit) -> Bitsandbytes4bit:
    """Returns a weight of which codes and scales are copied, with the quant state that is written.

    It has no code map: that of the data type is written.
    """
    blob = layout.quant_state_json(weight.format, weight.shape, weight.nested_offset)
    return replace(weight, quant_map=None, quant_state=None, blob=blob)


def _lacking(values: TensorInfo, components: Mapping[str, TensorInfo]) -> Iterator[WeightFault]:
    """Yields what a weight lacks, and quant states too many."""
    states = [suffix for suffix in components if suffix.startswith(QUANT_STATE_PREFIX)]
    absmax = components.get("absmax")
    is_nested = (
        "nested_absmax" in components
        or "nested_quant_map" in components
        or (absmax is not None and absmax.dtype == "U8")
    )
    needed = ("absmax", "nested_absmax", "nested_quant_map") if is_nested else ("absmax",)
    missing = [] if states else ["quant_state"]
    missing += [suffix for suffix in needed if suffix not in components]
    for suffix in missing:
        yield WeightFault("components", values, f"{suffix} is missing", Severity.FATAL)
    if len(states) > 1:
        text = f"has {len(states)} quant states: {', '.join(states)}"
        yield WeightFault("components", values, text, Severity.FATAL)
    if "quant_map" not in components:
        text = (
            "quant_map is missing, as in saves of some other tools; bitsandbytes then fails: "
            "KeyError"
        )
        yield WeightFault("components", values, text, Severity.REPAIRED)


def _read_state(
    blob: TensorInfo,
    suffix: str,
    components: Mapping[str, TensorInfo],
    read: Callable[[TensorInfo], bytes],
    scales: str,
) -> tuple[StateFields | None, list[WeightFault]]:
    """Reads a quant state, whose suffix names the quant type; returns its fields and faults."""
    if blob.dtype != "U8" or blob.nbytes > layout.LARGEST_QUANT_STATE:
        text = f"{blob.nbytes:,} bytes of {blob.dtype} are no quant state"
        return None, [WeightFault("quant state", blob, text, Severity.FATAL)]
    fields, of_state = layout.read_quant_state(read(blob), "nested_absmax" in components)
    faults = []
    for fault in of_state:
        severity = Severity.FATAL if fault.is_fatal else Severity.REPAIRED
        faults.append(WeightFault("quant state", blob, fault.text, severity))
    if fields is None:
        return None, faults
    if suffix != f"{QUANT_STATE_PREFIX}{fields.format.quant_type}":
        text = f"says {fields.format.quant_type} inside"
        faults.append(WeightFault("quant state", blob, text, Severity.FATAL))
    # the mean of absmax, or of searched scales
    offset = fields.nested_offset or 0.0
    if not math.isfinite(offset) or (offset < 0 and scales == "absmax"):
        also = ", not negative" if scales == "absmax" else ""
        text = f"nested_offset is {offset!r}, expected a finite number{also}"
        faults.append(WeightFault("quant state", blob, text, Severity.LASTING))
    return fields, faults


def _layout_faults(
    weight: Bitsandbytes4bit, components: Mapping[str, TensorInfo]
) -> Iterator[WeightFault]:
    """Yields what is wrong with dtype, size or shape of the codes, and of their components."""
    values = weight.values
    packed_bytes = -(-weight.elements // 2)
    if values.dtype not in STORAGE_DTYPES:
        severity = Severity.LASTING if values.dtype == "I8" else Severity.FATAL
        text = f"is {values.dtype}, expected U8 or, for FSDP, a float dtype"
        yield WeightFault("layout", values, text, severity)
    if values.nbytes != packed_bytes:
        wanted = f"{packed_bytes:,} for {list(weight.shape)}"
        text = f"{values.nbytes:,} bytes of codes, expected {wanted}"
        yield WeightFault("layout", values, text, Severity.FATAL)
    elif len(values.shape) != 2 or values.shape[1] != 1:
        text = f"packed as {list(values.shape)}, not as [n, 1]: diffusers refuses it"
        yield WeightFault("layout", values, text, Severity.NOTE)
    # the first component is the codes, the last the quant state
    for expected in layout.components(weight.format, weight.shape)[1:-1]:
        part = components.get(expected.suffix)
        if part is None or (part.dtype == expected.dtype and part.shape == expected.shape):
            continue
        wanted = f"{expected.dtype} {list(expected.shape)}"
        severity = Severity.FATAL
        if expected.suffix == "quant_map" and part.elements == math.prod(expected.shape):
            # decoding does not need it; where only its shape is wrong, its values are looked at
            is_readable = part.dtype == expected.dtype
            severity = Severity.REPAIRED if is_readable else Severity.LASTING
        text = f"{part.dtype} {list(part.shape)}, expected {wanted}"
        if expected.suffix == "absmax" and part.dtype == "BF16":
            text = (
                f"bfloat16 and transposed {list(part.shape)}: bitsandbytes on a CPU, saved after "
                f"a forward pass; a GPU misreads it. Expected {wanted}; quantize the original again"
            )
        yield WeightFault("layout", part, text, severity)


def _map_faults(
    part: TensorInfo | None,
    values: Sequence[float],
    name: str,
    read: Callable[[TensorInfo], bytes],
) -> Iterator[WeightFault]:
    """Yields how a code map differs from the standard one of that name, with these values."""
    if part is None or part.dtype != "F32" or part.elements != len(values):
        return
    stored = struct.unpack(f"<{len(values)}f", read(part))
    wrong = [place for place, value in enumerate(values) if stored[place] != value]
    is_nested = values is DYNAMIC_MAP
    far = _distance(stored, values)
    if far <= (_NEARLY_EQUAL if is_nested else 0):
        return
    is_close = far <= _CLOSE
    severity = Severity.REPAIRED if is_close and not is_nested else Severity.LASTING
    text = f"value {wrong[0]} is not that of {name}"
    # where one value stands out, it was damaged: lost precision shows in many
    if is_close and len(wrong) >= len(values) // 4:
        severity = Severity.NOTE if is_nested else Severity.REPAIRED
        text = (
            f"{name} in low precision, as bitsandbytes before 0.45.3 made it under another "
            f"default dtype"
        )
    for other, book in CODEBOOKS.items():
        if stored == tuple(book.values):
            text = f"the values are those of {other}, not {name}"
    yield WeightFault("code maps", part, text, severity)


def _distance(stored: Sequence[float], expected: Sequence[float]) -> float:
    """Returns the largest relative difference of a value; NaN is infinitely far."""
    largest = 0.0
    for found, value in zip(stored, expected, strict=True):
        if found == value:
            continue
        if value == 0 or math.isnan(found):
            return math.inf
        largest = max(largest, abs(found - value) / abs(value))
    return largest
