"""Chooses the format of packed weights, and which weights of a 4-bit source stay as they are.

A weight that is in the format asked for is not decoded and packed again, which would round its
scales a second time. Around its codes and scales everything is written as current loaders want it:
all tensors in one shard, the code map, the quant state, the shape of the codes. A weight with any
other fault that verify would find is packed anew.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from nf4conv.choose.decisions import Keep, Pack
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.format.layout import QUANT_STATE_PREFIX, Format
from nf4conv.models.config import checkpoint_dtype
from nf4conv.options import DTYPES, QuantizeOptions
from nf4conv.sources.foreign.bitsandbytes import (
    Bitsandbytes4bit,
    Severity,
    as_written_anew,
    check_weight,
)
from nf4conv.sources.record import read_record, recorded_scales
from nf4conv.sources.source import Source, read_together
from nf4conv.sources.tensors import TensorInfo


def choose_format(source: Source, options: QuantizeOptions) -> Format:
    """Returns the format of packed weights.

    An option that is left open is as in the source, if that is in 4 bits, or else has its default.
    """
    dtype = options.dtype or _dtype_of_source(source)
    default = _common_format(source)
    if default is None:
        default = Format("nf4", 64, True, dtype)
    double_quant = options.double_quant
    if double_quant is None:
        double_quant = default.double_quant
    # other weights beside those that a source has calibrated are searched
    scales = "search" if default.scales == "calibrated" else default.scales
    return Format(
        quant_type=options.quant_type or default.quant_type,
        blocksize=options.blocksize or default.blocksize,
        double_quant=double_quant,
        dtype=dtype,
        quant_storage=options.quant_storage or default.quant_storage,
        scales=options.scales or scales,
    )


def _dtype_of_source(source: Source) -> str:
    """Returns the dtype that weights are cast to before packing, and that others are stored in."""
    dtype = checkpoint_dtype(source.config or {}) or dominant_dtype(source.tensors)
    if dtype not in DTYPES:
        raise PlanError(
            f"{source.folder}/config.json: {dtype} is not a dtype that can be packed; "
            f"give --dtype {', '.join(DTYPES)}"
        )
    return dtype


def dominant_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Returns the name of the float dtype that most bytes are stored in; "float32" if none is."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in DTYPE_NAMES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        return "float32"
    return DTYPE_NAMES[max(sizes, key=sizes.__getitem__)]


def _common_format(source: Source) -> Format | None:
    """Returns the format in which most elements are packed; None where nothing is in 4 bits.

    Its scales are those of most elements in 4 bits.
    """
    elements: Counter[Format] = Counter()
    elements_by_scales: Counter[str] = Counter()
    scales_of = recorded_scales(read_record(source.folder))
    for tensor in source.tensors:
        encoding = tensor.unmerged.encoding
        if isinstance(encoding, Bitsandbytes4bit):
            elements[encoding.format] += tensor.elements
            elements_by_scales[scales_of(encoding.values.name)] += tensor.elements
    if not elements:
        return None
    format, _ = elements.most_common(1)[0]
    scales, _ = elements_by_scales.most_common(1)[0]
    return replace(format, scales=scales)


def weights_that_stay(
    source: Source,
    decisions: Mapping[str, Pack | Keep],
    format: Format,
    options: QuantizeOptions,
) -> dict[str, Bitsandbytes4bit | str]:
    """Finds the weights of a 4-bit source that are to be packed and can stay as they are.

    Reads the small tensors beside them. Returns, for each weight in 4 bits that is to be packed,
    what its components are copied from, or why it has to be packed anew. The format's dtype does
    not matter: it is that of other tensors. Nor do its scales: a search cannot improve values that
    are in 4 bits already.
    """
    scales_of = recorded_scales(read_record(source.folder))
    found: dict[str, Bitsandbytes4bit | str] = {}
    alike: dict[str, Bitsandbytes4bit] = {}
    for tensor in source.tensors:
        encoding = tensor.encoding
        decision = decisions[tensor.name]
        if not isinstance(encoding, Bitsandbytes4bit) or not isinstance(decision, Pack):
            continue
        scales = scales_of(encoding.values.name)
        dtype = encoding.format.dtype
        if len(decision.matrices) > 1:
            found[tensor.name] = "taken out of a stack"
        elif options.dtype not in (None, dtype):
            found[tensor.name] = f"stored as {dtype}"
        elif scales == "search" and options.scales == "absmax":
            found[tensor.name] = "stored with searched scales"
        elif not encoding.format.decodes_like(format):
            found[tensor.name] = f"stored as {encoding.format}"
        else:
            recorded = replace(encoding.format, scales=scales)
            alike[tensor.name] = found[tensor.name] = replace(encoding, format=recorded)
    parts: list[TensorInfo] = []
    for encoding in alike.values():
        small_ones = (encoding.quant_map, encoding.nested_quant_map, encoding.quant_state)
        parts += [part for part in small_ones if part is not None]
    small = read_together(source, parts)
    for name, encoding in alike.items():
        found[name] = _copied_from(encoding, lambda part: small[part.name])
    return found


def _copied_from(
    weight: Bitsandbytes4bit, read: Callable[[TensorInfo], bytes]
) -> Bitsandbytes4bit | str:
    """Returns what a weight is copied from, or a text that says why it has to be packed anew."""
    components = dict(weight.parts)
    values = components.pop("values")
    state = components.pop("quant_state")
    components[f"{QUANT_STATE_PREFIX}{weight.format.quant_type}"] = state
    _, faults = check_weight(values, components, read, weight.format.scales)
    for fault in faults:
        if fault.severity >= Severity.LASTING:
            return f"{fault.check}: {fault.text}"
    return as_written_anew(weight)
