"""Weights of a 4-bit source that stay as they are: what they are stored as, and what their tensors
are copied from.

A weight that is in the format asked for is not decoded and packed again, which would round its
scales a second time. Around its codes and scales everything is written as current loaders want it:
all tensors in one shard, the code map, the quant state, the shape of the codes. What verify finds
wrong beyond that is packed anew.
"""

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.format import layout
from nf4conv.format.codebook import CODEBOOKS
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format
from nf4conv.sources.record import recorded_scales
from nf4conv.sources.source import Source, read_together
from nf4conv.sources.stored_weights import CLOSE, Structure, check_weight, distance
from nf4conv.sources.tensors import Bitsandbytes4bit, TensorInfo


class Stored(NamedTuple):
    """What a weight is copied from."""

    # of each component but the JSON blob, in the order of layout.components; some are given as they
    # are
    parts: tuple[TensorInfo | bytes, ...]
    blob: bytes  # the JSON


def stored_format(tensor: TensorInfo) -> Format | None:
    """How a weight of a 4-bit source is packed; None for any other tensor."""
    encoding = tensor.encoding
    if not isinstance(encoding, Bitsandbytes4bit):
        return None
    return Format(
        encoding.quant_type,
        encoding.blocksize,
        encoding.double_quant,
        layout.DTYPE_NAMES[tensor.dtype],
        layout.STORAGE_DTYPES.get(encoding.values.dtype, "uint8"),
    )


def common_format(tensors: Iterable[TensorInfo]) -> Format | None:
    """The format that most of a source is packed in; None where nothing is in 4 bits."""
    sizes: Counter[Format] = Counter()
    for tensor in tensors:
        format = stored_format(tensor.unmerged)
        if format is not None:
            sizes[format] += tensor.elements
    return sizes.most_common(1)[0][0] if sizes else None


def small_parts(tensor: TensorInfo) -> Iterable[TensorInfo]:
    """The tensors that describe a packed weight: its maps and its quant state."""
    parts = () if tensor.encoding is None else tensor.encoding.parts
    return (
        part for role, part in parts if role.endswith("_map") or role.startswith(QUANT_STATE_PREFIX)
    )


def copied_from(
    tensor: TensorInfo, format: Format, read: Callable[[TensorInfo], bytes]
) -> Stored | str:
    """What a weight is copied from; or, as a text, why it has to be packed anew.

    The tensor is a weight of a 4-bit source, and `read` reads one of its `small_parts`. Of the
    format that is asked for the dtype, which is that of other tensors, does not matter, nor do the
    scales: a search finds nothing better than what has no error.
    """
    mine, encoding = stored_format(tensor), tensor.encoding
    if mine is None or encoding is None:
        return "not in 4 bits"
    if not mine.decodes_like(format):
        return f"stored as {mine}"
    parts = dict(encoding.parts)
    values, role = parts.pop("values"), f"{QUANT_STATE_PREFIX}{mine.quant_type}"
    try:
        fields = json.loads(read(parts[role]))
        offset = float(fields["nested_offset"]) if mine.double_quant else None
        written = {role: layout.quant_state_json(mine, fields["shape"], offset)}
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        return f"its quant state is damaged: {error}"
    table = CODEBOOKS[mine.quant_type].values
    raw = read(parts["quant_map"]) if "quant_map" in parts else struct.pack("<16f", *table)
    if len(raw) == 64 and distance(struct.unpack("<16f", raw), table) <= CLOSE:
        parts["quant_map"] = values._replace(
            name=f"{tensor.name}.quant_map", dtype="F32", shape=(16,)
        )
        written["quant_map"] = struct.pack("<16f", *table)
    given = {parts[suffix].name: content for suffix, content in written.items()}
    tensors = {tensor.name: values}
    structure = Structure(
        Path(), tensors, read=lambda part: given.get(part.name) or read(part), scales=format.scales
    )
    check_weight(structure, tensor.name, parts)
    for finding in structure.findings:
        if finding.is_fault and finding.check != "one shard":
            return f"{finding.check}: {finding.text}"
    suffixes = [part.suffix for part in layout.components(mine, tensor.shape)][1:-1]
    return Stored(
        (values, *(written.get(suffix) or parts[suffix] for suffix in suffixes)), written[role]
    )


def weights_that_stay(
    source: Source, decisions: Mapping[str, Pack | Keep], format: Format, dtype: str | None
) -> dict[str, Stored | str]:
    """Finds the weights of a 4-bit source that are to be packed and can stay as they are.

    Reads the small tensors beside them.

    Args:
        source: the checkpoint.
        decisions: what becomes of each tensor, by name.
        format: how weights are to be packed.
        dtype: name of the dtype that the user asked for; None if the choice was left open.

    Returns:
        For each weight in 4 bits that is to be packed, by name: what its components are copied
        from, or a text that says why it has to be packed anew.
    """
    packed: list[tuple[TensorInfo, Format]] = []
    for tensor in source.tensors:
        stored = stored_format(tensor)
        if stored is not None and isinstance(decisions[tensor.name], Pack):
            packed.append((tensor, stored))
    parts: list[TensorInfo] = []
    for tensor, stored in packed:
        if stored.decodes_like(format):
            parts += small_parts(tensor)
    small = read_together(source, parts)
    is_searched = recorded_scales(source.folder) == "search"
    found: dict[str, Stored | str] = {}
    for tensor, stored in packed:
        if dtype not in (None, stored.dtype):
            found[tensor.name] = f"stored as {stored.dtype}"
        elif is_searched and format.scales == "absmax":
            found[tensor.name] = "stored with searched scales"
        else:
            found[tensor.name] = copied_from(tensor, format, lambda part: small[part.name])
    return found
