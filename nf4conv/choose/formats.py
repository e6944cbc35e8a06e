"""Chooses everything about the quantization of one checkpoint: what is packed, how, what stays."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nf4conv.choose.decisions import Keep, Pack, Selection
from nf4conv.choose.selection import demote, select
from nf4conv.choose.unchanged import common_format, weights_that_stay
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_BITS, DTYPE_NAMES
from nf4conv.format.layout import Format
from nf4conv.models.config import checkpoint_dtype
from nf4conv.options import DTYPES, QuantizeOptions
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.source import Source
from nf4conv.sources.tensors import TensorInfo


@dataclass(frozen=True)
class Choice:
    """Holds what was chosen for one checkpoint."""

    # what becomes of each tensor, and the modules that loaders must skip
    selection: Selection
    # how weights are packed
    format: Format
    # for weights that are in 4 bits already and are to be packed, by name: what their components
    # are copied from, or a text that says why they are packed anew
    unchanged: Mapping[str, Bitsandbytes4bit | str]


def choose(source: Source, options: QuantizeOptions) -> Choice:
    """Chooses what is packed, in which format, and what stays as it is."""
    config = source.config or {}
    selection = select(source.tensors, config, options)
    dtype = _choose_dtype(source, selection, options)
    format = choose_format(source, dtype, options)
    selection = _without_odd_sizes(source, selection, format)
    unchanged = weights_that_stay(source, selection.decisions, format, options)
    return Choice(selection, format, unchanged)


def choose_format(source: Source | None, dtype: str, options: QuantizeOptions) -> Format:
    """Returns the format of packed weights.

    An option that is left open is as in the source, if that is in 4 bits, or else has its default.
    """
    default = Format("nf4", 64, True, dtype)
    if source is not None:
        default = common_format(source.tensors, source.recorded_in) or default
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


def _choose_dtype(source: Source, selection: Selection, options: QuantizeOptions) -> str:
    """Returns the dtype that weights are cast to before packing, and that others are stored in."""
    if options.dtype is not None:
        return options.dtype
    choices = ", ".join(DTYPES)
    dtype = checkpoint_dtype(source.config or {}) or dominant_dtype(source.tensors)
    if dtype not in DTYPES:
        raise PlanError(
            f"{source.folder}/config.json: {dtype} is not a dtype that can be packed; "
            f"give --dtype {choices}"
        )
    for tensor in source.tensors:
        if tensor.dtype == "F64" and isinstance(selection.decisions[tensor.name], Pack):
            raise PlanError.about(
                tensor.file,
                tensor.name,
                f"float64 cannot be packed; say what to cast it to: --dtype {choices}",
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


def _without_odd_sizes(source: Source, selection: Selection, format: Format) -> Selection:
    """Keeps the weights whose packed bytes do not divide into elements of the storage dtype."""
    size = DTYPE_BITS[format.storage_tag] // 8
    if size == 1:
        return selection
    odd = [name for name, decision in selection.decisions.items() if _is_odd(decision, size)]
    if not odd:
        return selection
    why = f"its packed bytes do not divide into {format.quant_storage}"
    return demote(selection, odd, source.tensors, source.config or {}, why)


def _is_odd(decision: Pack | Keep, size: int) -> bool:
    """Returns True if a packed weight's bytes do not divide into elements of this many bytes."""
    if isinstance(decision, Keep):
        return False
    for matrix in decision.matrices:
        packed_bytes = -(-math.prod(matrix.shape) // 2)
        if packed_bytes % size:
            return True
    return False
