"""Recognises encoded tensors by names, dtypes and shapes: a rule for each kind of encoding."""

from collections.abc import Sequence
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.format.layout import COMPONENT_SUFFIXES
from nf4conv.models.module_names import module_of
from nf4conv.sources.encodings.bitsandbytes import bitsandbytes_4bit, bitsandbytes_8bit
from nf4conv.sources.encodings.description import Block
from nf4conv.sources.encodings.hqq import packed_by_hqq
from nf4conv.sources.encodings.integers import (
    packed_by_awq,
    packed_by_compressed_tensors,
    packed_by_gptq,
)
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.scaled import Fp4, Scaled
from nf4conv.sources.tensors import TensorInfo

PLAIN_DTYPES: Final = ("F64", "F32", "F16", "BF16", "I64", "BOOL")
"""Dtypes of tensors that are stored as they are."""

_FLOAT8_DTYPES: Final = ("F8_E4M3", "F8_E5M2")

_PART_DTYPES: Final = (*PLAIN_DTYPES, *_FLOAT8_DTYPES, "U8", "I8", "I32", "F8_E8M0")
"""Dtypes of the parts of an encoded tensor."""

COMPONENT_ENDS: Final = tuple(f".{suffix}" for suffix in COMPONENT_SUFFIXES)
"""Ends of the names of what bitsandbytes stores beside the codes of a 4-bit weight."""


def decoded(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Returns the tensor that an encoded one decodes to.

    Args:
        tensor: a tensor as it is stored.
        siblings: all tensors of its checkpoint.

    Returns:
        A tensor with an encoding; None if this one holds no encoded values.

    Raises:
        SourceError: the tensor does not fit those that it would be decoded with, or is encoded in
            a way that nf4conv does not decode.
    """
    if tensor.name.endswith(COMPONENT_ENDS) or siblings.is_scale(tensor):
        return None
    for rule in _RULES:
        found = rule(tensor, siblings)
        if found is None:
            continue
        assert found.encoding is not None
        for _, part in found.encoding.parts:
            if part.dtype not in _PART_DTYPES:
                raise misfit(tensor, part)
        return found
    return None


def _stacked_mxfp4(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises the experts of gpt-oss: X_blocks [experts, out, groups, 16] and X_scales."""
    stem = tensor.name.removesuffix("_blocks")
    scales = siblings.find(f"{stem}_scales")
    if stem == tensor.name or scales is None or tensor.dtype != "U8":
        return None
    if len(tensor.shape) != 4 or tensor.shape[3] != 16 or scales.shape != tensor.shape[:3]:
        raise misfit(tensor, scales)
    experts, rows, groups, _ = tensor.shape
    values = tensor._replace(shape=(experts, rows, 16 * groups))
    return tensor._replace(
        name=stem,
        dtype=siblings.dtype,
        shape=(experts, 32 * groups, rows),
        encoding=Fp4(values, scales, is_transposed=True),
    )


def _packed_fp4(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises NVFP4 and MXFP4 of compressed-tensors: W_packed, W_scale, W_global_scale."""
    stem = tensor.name.removesuffix("_packed")
    scale = siblings.find(*_scale_names(stem))
    if stem == tensor.name or scale is None:
        return None
    if tensor.dtype != "U8":
        raise misfit(tensor, scale)
    divisor = siblings.find(f"{stem}_global_scale")
    _check_fp4(tensor, scale, divisor)
    return tensor._replace(
        name=stem,
        dtype=siblings.dtype,
        shape=(tensor.shape[0], 2 * tensor.shape[1]),
        encoding=Fp4(tensor, scale, divisor=divisor),
    )


def _plain_fp4(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises NVFP4 of ModelOpt, which has a W_scale_2, and the experts of DeepSeek-V4."""
    scale = siblings.find(*_scale_names(tensor.name))
    if scale is None or tensor.name.endswith("_packed"):
        return None
    multiplier = siblings.find(f"{tensor.name}_scale_2")
    is_of_modelopt = tensor.dtype == "U8" and multiplier is not None
    is_of_deepseek = tensor.dtype == "I8" and scale.dtype == "F8_E8M0"
    if not is_of_modelopt and not is_of_deepseek:
        return None
    _check_fp4(tensor, scale, multiplier)
    return tensor._replace(
        dtype=siblings.dtype,
        shape=(tensor.shape[0], 2 * tensor.shape[1]),
        encoding=Fp4(tensor, scale, multiplier=multiplier),
    )


def _check_fp4(values: TensorInfo, scale: TensorInfo, factor: TensorInfo | None) -> None:
    """Raises a SourceError unless each row has a scale for each 16, or each 32, of its values."""
    if len(values.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != values.shape[0]:
        raise misfit(values, scale)
    columns = 2 * values.shape[1]
    groups = scale.shape[1]
    if columns not in (16 * groups, 32 * groups):
        raise misfit(values, scale)
    if scale.dtype not in ("F8_E4M3", "F8_E8M0", "U8"):
        raise misfit(values, scale)
    if factor is not None and factor.elements != 1:
        raise misfit(values, scale)


def _scaled(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises 8-bit values with scales, and FP8 values without any."""
    scale = siblings.find(*_scale_names(tensor.name))
    if tensor.dtype not in (*_FLOAT8_DTYPES, "I8"):
        return None
    if scale is None and tensor.dtype == "I8":
        return None
    if siblings.find(f"{tensor.name}_zero_point"):
        raise SourceError(
            f"{tensor.file}: {tensor.name}: has zero points; only symmetric quantization is "
            f"decoded",
            path=tensor.file,
            tensor=tensor.name,
        )
    if scale is None and siblings.description.method is not None:
        raise SourceError(
            f"{tensor.file}: {tensor.name}: {tensor.dtype} without a scale; the checkpoint is "
            f"incomplete",
            path=tensor.file,
            tensor=tensor.name,
        )
    block = None
    if scale is not None:
        block = _block_of_scale(tensor, scale, siblings.description.blocks)
    return tensor._replace(dtype=siblings.dtype, encoding=Scaled(tensor, scale, block))


def _scale_names(name: str) -> tuple[str, ...]:
    """Returns the names that the scales of a tensor may have."""
    names = (f"{name}_scale_inv", f"{name}_scale")
    module = module_of(name)
    if module == name:
        return names
    return (*names, f"{module}.scale", f"{module}.qscale_weight")


def _block_of_scale(tensor: TensorInfo, scale: TensorInfo, blocks: Sequence[Block]) -> Block | None:
    """Returns the (rows, columns) that share a scale.

    Args:
        tensor: the values.
        scale: their scales.
        blocks: blocks that may share a scale, by the config.

    Returns:
        None where there is one scale for all values, for each row, or for each column.

    Raises:
        SourceError: the scales fit neither the values nor any of the blocks.
    """
    if scale.elements == 1 or scale.shape == tensor.shape[:1]:
        return None
    if len(scale.shape) != len(tensor.shape) or len(tensor.shape) < 2:
        raise misfit(tensor, scale)
    *stacked, rows, columns = tensor.shape
    if scale.dtype in ("U8", "F8_E8M0"):
        blocks = (*blocks, (1, 32))  # MXFP8
    for height, width in blocks:
        if scale.shape == (*stacked, -(-rows // height), -(-columns // width)):
            return min(height, max(rows, 1)), min(width, max(columns, 1))
    if all(size in (1, whole) for size, whole in zip(scale.shape, tensor.shape, strict=True)):
        return None
    raise misfit(tensor, scale)


_RULES: Final = (
    _stacked_mxfp4,
    packed_by_compressed_tensors,
    packed_by_gptq,
    packed_by_awq,
    packed_by_hqq,
    _packed_fp4,
    _plain_fp4,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    _scaled,
)
"""The first rule that recognises a tensor decides."""
