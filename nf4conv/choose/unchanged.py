"""Decides which weights of a 4-bit source stay as they are, and what they are copied from.

A weight that is in the format asked for is not decoded and packed again, which would round its
scales a second time. Around its codes and scales everything is written as current loaders want it:
all tensors in one shard, the code map, the quant state, the shape of the codes. A weight with any
other fault that verify would find is packed anew.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.format import layout
from nf4conv.format.codebook import CODEBOOKS
from nf4conv.format.layout import Format
from nf4conv.options import QuantizeOptions
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.record import recorded_scales
from nf4conv.sources.source import Source, read_together
from nf4conv.sources.stored_weights import Structure
from nf4conv.sources.tensors import TensorInfo
from nf4conv.sources.weight_faults.code_maps import CLOSE, distance
from nf4conv.sources.weight_faults.weight import check_weight

_ONE_SHARD = "one shard"
"""The only check that a weight may fail: all its tensors are written to one shard anyway."""


class Stored(NamedTuple):
    """Tells what the tensors of a weight are copied from.

    Attributes:
        parts: the tensor to copy, or the bytes to write, for each component except the quant state,
            in the order of `layout.components`.
        blob: the JSON of the quant state.
        scales: how its blocks were scaled, one of codebook.RECORDED_SCALES.
    """

    parts: tuple[TensorInfo | bytes, ...]
    blob: bytes
    scales: str


def common_format(tensors: Iterable[TensorInfo], place: Path) -> Format | None:
    """Returns the format in which most elements are packed; None where nothing is in 4 bits.

    Its scales are those of most elements in 4 bits.

    Args:
        tensors: the tensors of a checkpoint.
        place: the folder of the checkpoint, or its only file.
    """
    elements: Counter[Format] = Counter()
    elements_by_scales: Counter[str] = Counter()
    scales_of = recorded_scales(place)
    for tensor in tensors:
        encoding = tensor.unmerged.encoding
        if isinstance(encoding, Bitsandbytes4bit):
            elements[encoding.format] += tensor.elements
            elements_by_scales[scales_of(encoding.values.name)] += tensor.elements
    if not elements:
        return None
    format, _ = elements.most_common(1)[0]
    scales, _ = elements_by_scales.most_common(1)[0]
    return replace(format, scales=scales)


def _small_parts(encoding: Bitsandbytes4bit) -> Iterator[TensorInfo]:
    """Yields the tensors that describe a packed weight: its maps and its quant state."""
    for part in (encoding.quant_map, encoding.nested_quant_map, encoding.quant_state):
        if part is not None:
            yield part


@dataclass(frozen=True)
class _Renewed:
    """Holds the components of a weight that are written anew, as bytes."""

    quant_state: bytes
    # None if the code map of the source is too far from that of the data type
    quant_map: bytes | None


def _copied_from(
    tensor: TensorInfo, format: Format, scales: str, read: Callable[[TensorInfo], bytes]
) -> Stored | str:
    """Returns what a weight is copied from, or a text that says why it has to be packed anew.

    Args:
        tensor: a weight of a 4-bit source.
        format: the format that is asked for. Its dtype does not matter: it is that of other
            tensors. Nor do its scales: a search cannot improve values that are in 4 bits already.
        scales: how the weight was scaled.
        read: reads one of the `_small_parts` of the weight.
    """
    encoding = tensor.encoding
    assert isinstance(encoding, Bitsandbytes4bit)
    stored = encoding.format
    if not stored.decodes_like(format):
        return f"stored as {stored}"
    try:
        quant_state = _quant_state_of(stored, read(encoding.quant_state))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return f"its quant state is damaged: {error}"
    renewed = _Renewed(quant_state, _quant_map_of(stored, encoding, read))
    fault = _fault_of(tensor, encoding, renewed, scales, read)
    if fault is not None:
        return fault

    components = dict(encoding.parts)
    parts: list[TensorInfo | bytes] = [encoding.values]
    # the first component is the weight itself, the last the quant state
    for component in layout.components(stored, tensor.shape)[1:-1]:
        if component.suffix == "quant_map" and renewed.quant_map is not None:
            parts.append(renewed.quant_map)
        else:
            parts.append(components[component.suffix])
    return Stored(tuple(parts), quant_state, scales)


def _quant_state_of(stored: Format, blob: bytes) -> bytes:
    """Returns the quant state as bitsandbytes writes it today, from one of any release."""
    fields = json.loads(blob)
    offset = float(fields["nested_offset"]) if stored.double_quant else None
    if offset is not None and not math.isfinite(offset):
        raise ValueError(f"nested_offset is {offset}")
    return layout.quant_state_json(stored, fields["shape"], offset)


def _quant_map_of(
    stored: Format, encoding: Bitsandbytes4bit, read: Callable[[TensorInfo], bytes]
) -> bytes | None:
    """Returns the code map of the data type; None if the source's is another one."""
    values = CODEBOOKS[stored.quant_type].values
    standard = struct.pack("<16f", *values)
    if encoding.quant_map is None:
        return standard
    found = read(encoding.quant_map)
    if len(found) != len(standard) or distance(struct.unpack("<16f", found), values) > CLOSE:
        return None
    return standard


def _fault_of(
    tensor: TensorInfo,
    encoding: Bitsandbytes4bit,
    renewed: _Renewed,
    scales: str,
    read: Callable[[TensorInfo], bytes],
) -> str | None:
    """Returns what verify would find wrong with a weight once it is copied; None if nothing."""
    components = dict(encoding.parts)
    del components["values"]
    written = {encoding.quant_state.name: renewed.quant_state}
    if renewed.quant_map is not None:
        quant_map = encoding.values._replace(
            name=f"{tensor.name}.quant_map", dtype="F32", shape=(16,)
        )
        components["quant_map"] = quant_map
        written[quant_map.name] = renewed.quant_map

    def read_as_written(part: TensorInfo) -> bytes:
        return written[part.name] if part.name in written else read(part)

    # a checkpoint of this weight alone
    structure = Structure(
        Path(), {tensor.name: encoding.values}, read=read_as_written, scales=lambda _: scales
    )
    check_weight(structure, tensor.name, components)
    for finding in structure.findings:
        if finding.is_fault and finding.check != _ONE_SHARD:
            return f"{finding.check}: {finding.text}"
    return None


def weights_that_stay(
    source: Source,
    decisions: Mapping[str, Pack | Keep],
    format: Format,
    options: QuantizeOptions,
) -> dict[str, Stored | str]:
    """Finds the weights of a 4-bit source that are to be packed and can stay as they are.

    Reads the small tensors beside them.

    Args:
        source: the checkpoint.
        decisions: what becomes of each tensor, by name.
        format: how weights are to be packed.
        options: what the user asked for.

    Returns:
        For each weight in 4 bits that is to be packed, by name: what its components are copied
        from, or a text that says why it has to be packed anew.
    """
    packed: list[tuple[TensorInfo, Bitsandbytes4bit]] = []
    for tensor in source.tensors:
        encoding = tensor.encoding
        if isinstance(encoding, Bitsandbytes4bit) and isinstance(decisions[tensor.name], Pack):
            packed.append((tensor, encoding))
    parts: list[TensorInfo] = []
    for _, encoding in packed:
        if encoding.format.decodes_like(format):
            parts += _small_parts(encoding)
    small = read_together(source, parts)
    scales_of = recorded_scales(source.recorded_in)
    found: dict[str, Stored | str] = {}
    for tensor, encoding in packed:
        scales = scales_of(encoding.values.name)
        decision = decisions[tensor.name]
        dtype = encoding.format.dtype
        if isinstance(decision, Pack) and len(decision.matrices) > 1:
            found[tensor.name] = "taken out of a stack"
        elif options.dtype not in (None, dtype):
            found[tensor.name] = f"stored as {dtype}"
        elif scales == "search" and options.scales == "absmax":
            found[tensor.name] = "stored with searched scales"
        else:
            found[tensor.name] = _copied_from(tensor, format, scales, lambda part: small[part.name])
    return found
