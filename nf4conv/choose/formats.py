"""Chooses everything about the quantization of one checkpoint: what is packed, how, what stays."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nf4conv.choose.decisions import Pack, Selection
from nf4conv.choose.selection import select
from nf4conv.choose.unchanged import common_format, weights_that_stay
from nf4conv.errors import PlanError
from nf4conv.format.dtypes import DTYPE_NAMES
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
    dtype = options.dtype or _dtype_of_source(source)
    format = choose_format(source, dtype, options)
    selection = select(source.tensors, config, options, format=format)
    if options.dtype is None:
        _check_float64(source, selection)
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


def _dtype_of_source(source: Source) -> str:
    """Returns the dtype that weights are cast to before packing, and that others are stored in."""
    dtype = checkpoint_dtype(source.config or {}) or dominant_dtype(source.tensors)
    if dtype not in DTYPES:
        raise PlanError(
            f"{source.folder}/config.json: {dtype} is not a dtype that can be packed; "
            f"give --dtype {', '.join(DTYPES)}"
        )
    return dtype


def _check_float64(source: Source, selection: Selection) -> None:
    """Raises a PlanError if a weight in float64 is to be packed."""
    for tensor in source.tensors:
        if tensor.dtype == "F64" and isinstance(selection.decisions[tensor.name], Pack):
            raise PlanError.about(
                tensor.file,
                tensor.name,
                f"float64 cannot be packed; say what to cast it to: --dtype {', '.join(DTYPES)}",
            )


def dominant_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Returns the name of the float dtype that most bytes are stored in; "float32" if none is."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        if tensor.dtype in DTYPE_NAMES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    if not sizes:
        return "float32"
    return DTYPE_NAMES[max(sizes, key=sizes.__getitem__)]
