"""Tensors that another quantization encoded, seen as the float tensors they stand for.

Which tensors belong together, and how they decode, is told by their names and dtypes, and checked
by their shapes; the config only says who made them and, where shapes do not tell, how large the
blocks are that share a scale.

    stored                                                         by
    W                 F8, I8   W_scale_inv, W_scale, P.scale …     transformers fp8 and fbgemm_fp8, DeepSeek, Mistral,
                                                                   compressed-tensors, ModelOpt,
                                                                   MXFP8
    W                 F8       nothing                             plain casts
    P.weight_packed   U8       P.weight_scale [, _global_scale]    compressed-tensors NVFP4, MXFP4
    W                 U8       W_scale, W_scale_2                  ModelOpt NVFP4
    W                 I8       P.scale in F8_E8M0, 32 a row        DeepSeek-V4's experts
    X_blocks          U8       X_scales                            gpt-oss MXFP4, decoded to X
    P.weight          I8       P.SCB                               bitsandbytes 8-bit
    W                 U8       W.absmax, W.quant_state.…           bitsandbytes 4-bit

W is P.weight, or any other name. What is left over and belongs to activations is dropped.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from nf4conv.errors import CodecError, SourceError
from nf4conv.format import layout
from nf4conv.models.config import LEFTOVERS, levels
from nf4conv.models.families import families_of, is_transposed
from nf4conv.models.family import Family
from nf4conv.models.module_names import module_of
from nf4conv.sources.tensors import (
    Bitsandbytes4bit,
    Bitsandbytes8bit,
    Fp4,
    Scaled,
    TensorInfo,
)

_NAMES: Final = json.loads(Path(__file__).with_name("encodings.json").read_bytes())
_ACCEPTED: Final = tuple(_NAMES["accepted"])
"""Values of quant_method whose tensors are decoded. ModelOpt's has variants, such as modelopt_fp4.
"""
_REFUSED: Final = {
    method: reason for reason, methods in _NAMES["refused"].items() for method in methods
}
_TWICE: Final = _REFUSED["gptq"]
_FLOAT8: Final = ("F8_E4M3", "F8_E5M2")
_PLAIN: Final = ("F64", "F32", "F16", "BF16", "I64", "BOOL")
_PARTS: Final = (
    *_PLAIN,
    *_FLOAT8,
    "U8",
    "I8",
    "F8_E8M0",
)  # of what is decoded, and of what it is decoded with
_STORAGE: Final = (
    "U8",
    "I8",
    "BF16",
    "F16",
    "F32",
)  # of the codes of bitsandbytes' 4 bits, see its quant_storage
_UNREAD: Final = ("F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")
_ACTIVATIONS: Final = tuple(_NAMES["activations"])
"""Ends of names of what a quantized model needs to run, and a decoded one does not."""
_COMPONENTS: Final = tuple(f".{suffix}" for suffix in layout.COMPONENT_SUFFIXES)
_OF_WEIGHTS: Final = (*_NAMES["weights"], *_COMPONENTS)
"""Ends of names of parts of encoded weights; one that is not used means that something is not
understood.
"""
_SCALES: Final = ("absmax", "nested_absmax", "nested_quant_map")
"""What decoding a 4-bit weight of bitsandbytes takes beside its codes."""


@dataclass(frozen=True)
class _Siblings:
    """The tensors of a checkpoint, to find those that belong to one."""

    by_name: Mapping[str, TensorInfo]  # all of them
    method: str | None  # quant_method of the config; None when it names none
    blocks: tuple[tuple[int, int], ...]  # [rows, columns] that may share a scale, by the config
    dtype: str  # tag of what is decoded to
    families: tuple[Family, ...]  # deviations of the model's family that are listed
    read: Callable[[TensorInfo], bytes]  # reads a small tensor

    def find(self, *names: str) -> TensorInfo | None:
        return next((self.by_name[name] for name in names if name in self.by_name), None)

    def is_scale(self, tensor: TensorInfo) -> bool:
        """Whether a tensor is the scale of another, which may be 8-bit itself."""
        stem, _, ending = tensor.name.rpartition("_scale")
        return (
            bool(stem)
            and ending in ("", "_inv", "_2", "s")
            and bool(self.find(stem, f"{stem}_packed"))
        )


def decoded_tensors(
    tensors: Sequence[TensorInfo],
    config: Mapping[str, Any],
    exported: Mapping[str, Any],
    dtype: str,
    read: Callable[[TensorInfo], bytes],
) -> tuple[tuple[TensorInfo, ...], tuple[str, ...]]:
    """What a checkpoint holds once everything encoded in it is decoded, and a line for the user
    about what was done.

    The tensors are as stored, and given back in their order, those decoded with an `Encoding`; of
    their data only small descriptions are read. `config` is the content of config.json, `exported`
    that of hf_quant_config.json, which ModelOpt writes, or empty; `dtype` is the tag of what to
    decode to where the source does not say: "BF16" or "F16". A SourceError if the method is not one
    that is decoded, or tensors do not fit together, names them.
    """
    description, of_modelopt = quantization_of(config), exported.get("quantization")
    if description is None and isinstance(of_modelopt, Mapping):
        description = {"quant_method": "modelopt", **of_modelopt}
    method = (
        None
        if description is None
        else str(description.get("quant_method") or "compressed-tensors").lower()
    )
    if method is not None and not method.startswith(_ACCEPTED):
        reason = _REFUSED.get(method, "a format that nf4conv does not decode")
        raise SourceError(
            f"already quantized: quant_method {method}; give the checkpoint that it was made "
            f"from: {reason}"
        )
    found: dict[str, TensorInfo] = {}
    if any(
        tensor.dtype not in _PLAIN for tensor in tensors
    ):  # every encoding has parts in another dtype
        by_name, blocks = (
            {tensor.name: tensor for tensor in tensors},
            tuple(_blocks(description or {})),
        )
        siblings = _Siblings(by_name, method, blocks, dtype, families_of(config), read)
        found = {
            tensor.name: decoded
            for tensor in tensors
            if (decoded := _decoded(tensor, siblings)) is not None
        }
    if not found and method is None:
        _check_unused(tensors)
        return tuple(tensors), ()
    parts = {
        part.name
        for decoded in found.values()
        if decoded.encoding
        for _, part in decoded.encoding.parts
    }
    rest = [
        tensor
        for tensor in tensors
        if tensor.name not in parts and not tensor.name.endswith(_ACTIVATIONS)
    ]
    _check_unused(rest)
    kept = {tensor.name for tensor in rest}
    logical = tuple(
        found.get(tensor.name, tensor)
        for tensor in tensors
        if tensor.name in kept or tensor.name in found
    )
    names = Counter(
        decoded.encoding.name for decoded in found.values() if decoded.encoding is not None
    )
    counts = ", ".join(f"{count:,} of {name}" for name, count in names.items())
    by = f" ({method})" if method else ""
    return logical, (f"the source is quantized{by}: {counts}",) if names else ()


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The description of a quantization in a config, wherever it stands; None when there is none."""
    found = (level.get(key) for _, level in levels(config) for key in LEFTOVERS)
    return next((description for description in found if isinstance(description, Mapping)), None)


def _blocks(description: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """The shapes of blocks that share a scale, as far as a description names any."""
    found: list[Any] = [(1, description.get("group_size"))]
    if str(description.get("quant_method")) == "fp8":
        found.insert(
            0, description.get("weight_block_size", (128, 128))
        )  # the default of transformers
    groups = description.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found += [weights.get("block_structure"), (1, weights.get("group_size"))]
    for block in found:
        is_pair = isinstance(block, (list, tuple)) and len(block) == 2
        if is_pair and all(type(size) is int and size > 0 for size in block):
            yield block[0], block[1]


def _decoded(tensor: TensorInfo, siblings: _Siblings) -> TensorInfo | None:
    rules = () if tensor.name.endswith(_COMPONENTS) or siblings.is_scale(tensor) else _RULES
    decoded = next(
        (decoded for rule in rules if (decoded := rule(tensor, siblings)) is not None), None
    )
    for _, part in () if decoded is None or decoded.encoding is None else decoded.encoding.parts:
        if part.dtype not in _PARTS:
            raise _misfit(tensor, part)
    return decoded


def _stacked_mxfp4(tensor: TensorInfo, siblings: _Siblings) -> TensorInfo | None:
    stem = tensor.name.removesuffix("_blocks")
    scales = siblings.find(f"{stem}_scales")
    if stem == tensor.name or scales is None or tensor.dtype != "U8":
        return None
    if len(tensor.shape) != 4 or tensor.shape[3] != 16 or scales.shape != tensor.shape[:3]:
        raise _misfit(tensor, scales)
    experts, rows, groups, _ = tensor.shape
    values = tensor._replace(shape=(experts, rows, 16 * groups))
    encoding = Fp4(values, scales, is_transposed=True)
    return tensor._replace(
        name=stem, dtype=siblings.dtype, shape=(experts, 32 * groups, rows), encoding=encoding
    )


def _fp4(tensor: TensorInfo, siblings: _Siblings) -> TensorInfo | None:
    """Of compressed-tensors, of ModelOpt, or of DeepSeek-V4's experts, in this order."""
    stem = tensor.name.removesuffix("_packed")
    scale = siblings.find(*_scale_names(stem))
    more = (
        ("divisor", f"{stem}_global_scale")
        if stem != tensor.name
        else ("multiplier", f"{stem}_scale_2")
    )
    other = siblings.find(more[1])
    if scale is None:
        return None
    if stem != tensor.name and tensor.dtype != "U8":
        raise SourceError(
            f"{tensor.file}: {tensor.name}: {tensor.dtype} holds packed integers; give the "
            f"checkpoint that it was made "
            f"from: {_TWICE}"
        )
    is_of_modelopt = tensor.dtype == "U8" and other is not None
    if (
        stem == tensor.name
        and not is_of_modelopt
        and (tensor.dtype, scale.dtype) != ("I8", "F8_E8M0")
    ):
        return None
    fits = len(tensor.shape) == 2 and len(scale.shape) == 2 and scale.shape[0] == tensor.shape[0]
    if not fits or 2 * tensor.shape[1] not in (16 * scale.shape[1], 32 * scale.shape[1]):
        raise _misfit(tensor, scale)
    if scale.dtype not in ("F8_E4M3", "F8_E8M0", "U8") or (
        other is not None and other.elements != 1
    ):
        raise _misfit(tensor, scale)
    shape = (tensor.shape[0], 2 * tensor.shape[1])
    if more[0] == "divisor":
        encoding = Fp4(tensor, scale, divisor=other)
    else:
        encoding = Fp4(tensor, scale, multiplier=other)
    return tensor._replace(name=stem, dtype=siblings.dtype, shape=shape, encoding=encoding)


def _bitsandbytes_4bit(tensor: TensorInfo, siblings: _Siblings) -> TensorInfo | None:
    parts = {
        suffix: part
        for suffix in layout.COMPONENT_SUFFIXES
        if (part := siblings.find(f"{tensor.name}.{suffix}"))
    }
    blobs = [part for suffix, part in parts.items() if suffix.startswith(layout.QUANT_STATE_PREFIX)]
    if not blobs:
        return None
    blob, is_nested = blobs[-1], "nested_absmax" in parts or "nested_quant_map" in parts
    lost = ", ".join(
        suffix for suffix in (_SCALES if is_nested else _SCALES[:1]) if suffix not in parts
    )
    if lost:
        raise SourceError(
            f"{tensor.file}: {tensor.name}: lacks its {lost}, without which it cannot be decoded"
        )
    if len(blobs) > 1 or tensor.dtype not in _STORAGE:
        raise _misfit(tensor, blob)
    state = _quant_state(blob, siblings, is_nested)
    shape, dtype, blocksize = state.shape, state.dtype, state.blocksize
    info = tensor._replace(shape=shape, dtype=dtype)
    if -(-info.elements // 2) != tensor.nbytes:
        raise _misfit(tensor, parts["absmax"])
    for expected in layout.components(layout.Format("nf4", blocksize, is_nested, "float32"), shape):
        part = parts.get(expected.suffix, blob)
        if expected.suffix in _SCALES and (part.dtype, part.shape) != (
            expected.dtype,
            expected.shape,
        ):
            raise _misfit(tensor, part)
    if "quant_map" in parts and parts["quant_map"].elements != 16:  # it is read, but not needed
        raise _misfit(tensor, parts["quant_map"])
    transposed = len(shape) == 2 and is_transposed(module_of(tensor.name), siblings.families)
    encoding = Bitsandbytes4bit(
        values=tensor,
        absmax=parts["absmax"],
        quant_map=parts.get("quant_map"),
        nested_absmax=parts.get("nested_absmax"),
        nested_quant_map=parts.get("nested_quant_map"),
        quant_state=blob,
        quant_type=state.quant_type,
        blocksize=state.blocksize,
        dtype=dtype,
        nested_offset=state.nested_offset,
        has_plain_state=state.is_plain,
        is_transposed=transposed,
    )
    return info._replace(shape=shape[::-1] if transposed else shape, encoding=encoding)


@dataclass(frozen=True)
class _QuantState:
    """The fields of a quant state that decoding needs."""

    quant_type: str  # "nf4" or "fp4"
    shape: tuple[int, ...]  # of the weight before it was packed
    dtype: str  # tag of the weight before it was packed
    blocksize: int  # elements that share one absmax
    nested_offset: float  # 0 without double quantization
    is_plain: bool  # False if there are fields that bitsandbytes does not write today


def _quant_state(tensor: TensorInfo, siblings: _Siblings, is_nested: bool) -> _QuantState:
    if tensor.dtype != "U8" or tensor.nbytes > layout.LARGEST_QUANT_STATE:
        raise SourceError(
            f"{tensor.file}: {tensor.name}: {tensor.nbytes:,} bytes of {tensor.dtype} are no "
            f"quant state"
        )
    try:
        fields = layout.parse_quant_state(siblings.read(tensor), may_say_more=True)
        offset = layout.nested_offset_of(fields) if is_nested else 0.0
        is_plain = fields.keys() <= {*layout.JSON_KEYS, *layout.NESTED_JSON_KEYS}
    except CodecError as error:
        raise SourceError(
            f"{tensor.file}: {tensor.name}: not a quant state of bitsandbytes: {error}"
        ) from error
    if not tensor.name.endswith(f".{layout.QUANT_STATE_PREFIX}{fields['quant_type']}"):
        raise SourceError(
            f"{tensor.file}: {tensor.name}: its quant_type is {fields['quant_type']!r}"
        )
    return _QuantState(
        quant_type=fields["quant_type"],
        shape=tuple(fields["shape"]),
        dtype=layout.TAGS[fields["dtype"]],
        blocksize=fields["blocksize"],
        nested_offset=offset,
        is_plain=is_plain,
    )


def _bitsandbytes_8bit(tensor: TensorInfo, siblings: _Siblings) -> TensorInfo | None:
    stem = tensor.name.removesuffix("weight")
    scale = siblings.find(f"{stem}SCB")
    if stem == tensor.name or tensor.dtype != "I8" or scale is None:
        return None
    if len(tensor.shape) != 2 or scale.shape not in ((tensor.shape[0],), (tensor.shape[0], 1)):
        raise _misfit(tensor, scale)
    order = siblings.find(f"{stem}weight_format")
    if order is not None and any(siblings.read(order)):
        raise SourceError(
            f"{order.file}: {order.name}: a layout for one kind of GPU; only rows are decoded"
        )
    encoding = Bitsandbytes8bit(tensor, scale)
    return tensor._replace(dtype=siblings.dtype, encoding=encoding)


def _scaled(tensor: TensorInfo, siblings: _Siblings) -> TensorInfo | None:
    scale = siblings.find(*_scale_names(tensor.name))
    if tensor.dtype not in (*_FLOAT8, "I8") or (scale is None and tensor.dtype == "I8"):
        return None
    if siblings.find(f"{tensor.name}_zero_point"):
        raise SourceError(
            f"{tensor.file}: {tensor.name}: has zero points; only symmetric quantization is decoded"
        )
    if scale is None and siblings.method is not None:
        raise SourceError(
            f"{tensor.file}: {tensor.name}: {tensor.dtype} without a scale; the checkpoint is "
            f"incomplete"
        )
    block = None if scale is None else _shared_by(tensor, scale, siblings.blocks)
    return tensor._replace(dtype=siblings.dtype, encoding=Scaled(tensor, scale, block))


def _scale_names(name: str) -> tuple[str, ...]:
    module = module_of(name)
    inside = () if module == name else (f"{module}.scale", f"{module}.qscale_weight")
    return (f"{name}_scale_inv", f"{name}_scale", *inside)


def _shared_by(
    tensor: TensorInfo, scale: TensorInfo, blocks: Sequence[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return the (rows, columns) that share a scale.

    Returns:
        None where there is one scale for all values, for each row, or for each column.
    """
    if scale.elements == 1 or scale.shape == tensor.shape[:1]:
        return None
    if len(scale.shape) != len(tensor.shape) or len(tensor.shape) < 2:
        raise _misfit(tensor, scale)
    *stacked, rows, columns = tensor.shape
    of_bytes = ((1, 32),) if scale.dtype in ("U8", "F8_E8M0") else ()  # MXFP8
    for height, width in (*blocks, *of_bytes):
        if scale.shape == (*stacked, -(-rows // height), -(-columns // width)):
            return min(height, max(rows, 1)), min(width, max(columns, 1))
    if all(size in (1, whole) for size, whole in zip(scale.shape, tensor.shape, strict=True)):
        return None
    raise _misfit(tensor, scale)


def _misfit(tensor: TensorInfo, scale: TensorInfo) -> SourceError:
    return SourceError(
        f"{tensor.file}: {tensor.name}: {tensor.dtype} {list(tensor.shape)} does not go with "
        f"{scale.name}, {scale.dtype} {list(scale.shape)}"
    )


_RULES: Final = (_stacked_mxfp4, _fp4, _bitsandbytes_4bit, _bitsandbytes_8bit, _scaled)


def _check_unused(tensors: Sequence[TensorInfo]) -> None:
    for tensor in tensors:
        if tensor.name.endswith(_OF_WEIGHTS) or (
            tensor.dtype in _UNREAD and tensor.encoding is None
        ):
            raise SourceError(
                f"{tensor.file}: {tensor.name}: part of a weight that is already quantized, but "
                f"not in a way that is "
                "decoded; give the checkpoint that it was made from"
            )
