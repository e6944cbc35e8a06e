"""Recognises weights that bitsandbytes quantized, to 4 bits or to 8."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nf4conv.errors import CodecError, SourceError
from nf4conv.format import dtypes, layout
from nf4conv.models.families import is_transposed
from nf4conv.models.module_names import module_of
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.encodings.types.scaled import Bitsandbytes8bit
from nf4conv.sources.tensors import TensorInfo

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


def bitsandbytes_4bit(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
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
    lost = [suffix for suffix in needed if suffix not in components]
    if lost:
        raise SourceError.about(
            tensor.file,
            tensor.name,
            f"lacks its {', '.join(lost)}, without which it cannot be decoded",
        )


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
        dtype=dtypes.TAGS[fields["dtype"]],
        blocksize=fields["blocksize"],
        nested_offset=nested_offset,
        is_plain=fields.keys() <= {*layout.JSON_KEYS, *layout.NESTED_JSON_KEYS},
    )


def bitsandbytes_8bit(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of LLM.int8(): P.weight and P.SCB."""
    stem = tensor.name.removesuffix("weight")
    scale = siblings.find(f"{stem}SCB")
    if stem == tensor.name or tensor.dtype != "I8" or scale is None:
        return None
    if len(tensor.shape) != 2:
        raise misfit(tensor, scale)
    rows = tensor.shape[0]
    if scale.shape not in ((rows,), (rows, 1)):
        raise misfit(tensor, scale)
    order = siblings.find(f"{stem}weight_format")
    if order is not None and any(siblings.read(order)):
        raise SourceError.about(
            order.file, order.name, "a layout for one kind of GPU; only rows are decoded"
        )
    must_transpose = is_transposed(module_of(tensor.name), siblings.families)
    encoding = Bitsandbytes8bit(tensor, scale, is_transposed=must_transpose)
    shape = tensor.shape
    if must_transpose:
        shape = shape[::-1]
    return tensor._replace(shape=shape, dtype=siblings.dtype, encoding=encoding)
