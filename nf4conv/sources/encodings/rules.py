"""Recognises encoded tensors by names, dtypes and shapes: a rule for each kind of encoding."""

from typing import Final

from nf4conv.format.layout import COMPONENT_SUFFIXES
from nf4conv.sources.encodings.bitnet import packed_by_bitnet
from nf4conv.sources.encodings.bitsandbytes import bitsandbytes_4bit, bitsandbytes_8bit
from nf4conv.sources.encodings.hqq import packed_by_hqq
from nf4conv.sources.encodings.integers import (
    packed_by_awq,
    packed_by_compressed_tensors,
    packed_by_gptq,
    packed_by_quark,
    packed_by_torchao,
)
from nf4conv.sources.encodings.scaled import (
    FLOAT8_DTYPES,
    bytes_of_torchao,
    scale_names,
    scaled_bytes,
)
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.scaled import Fp4
from nf4conv.sources.tensors import TensorInfo

PLAIN_DTYPES: Final = ("F64", "F32", "F16", "BF16", "I64", "BOOL")
"""Dtypes of tensors that are stored as they are."""

_PART_DTYPES: Final = (*PLAIN_DTYPES, *FLOAT8_DTYPES, "U8", "I8", "I32", "F8_E8M0")
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
    scale = siblings.find(*scale_names(stem))
    if stem == tensor.name or scale is None:
        return None
    if tensor.dtype != "U8":
        raise misfit(tensor, scale)
    divisor = siblings.find(f"{stem}_global_scale")
    _check_fp4(tensor, scale, divisor)
    rows, pairs = tensor.shape
    return tensor._replace(
        name=stem,
        dtype=siblings.dtype,
        shape=(rows, 2 * pairs),
        encoding=Fp4(tensor, scale, divisor=divisor),
    )


def _plain_fp4(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises FP4 under the name of the weight.

    NVFP4 of ModelOpt has a W_scale_2, MXFP4 of Quark scales in bytes. The experts of DeepSeek-V4
    are in signed bytes.
    """
    scale = siblings.find(*scale_names(tensor.name))
    if scale is None or tensor.name.endswith("_packed"):
        return None
    multiplier = siblings.find(f"{tensor.name}_scale_2")
    is_of_modelopt = tensor.dtype == "U8" and multiplier is not None
    is_of_deepseek = tensor.dtype == "I8" and scale.dtype == "F8_E8M0"
    is_of_quark = siblings.description.method == "quark" and tensor.dtype == scale.dtype == "U8"
    if not is_of_modelopt and not is_of_deepseek and not is_of_quark:
        return None
    _check_fp4(tensor, scale, multiplier)
    rows, pairs = tensor.shape
    return tensor._replace(
        dtype=siblings.dtype,
        shape=(rows, 2 * pairs),
        encoding=Fp4(tensor, scale, multiplier=multiplier),
    )


def _check_fp4(values: TensorInfo, scale: TensorInfo, factor: TensorInfo | None) -> None:
    """Raises a SourceError unless each row has a scale for each 16, or each 32, of its values.

    Powers of two, in bytes, are for 32 values. Bytes for 16 are E5M3, as AutoRound writes them.
    """
    if len(values.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != values.shape[0]:
        raise misfit(values, scale)
    columns = 2 * values.shape[1]
    groups = scale.shape[1]
    if columns not in (16 * groups, 32 * groups):
        raise misfit(values, scale)
    if scale.dtype == "U8" and columns != 32 * groups:
        raise misfit(values, scale)
    if scale.dtype not in ("F8_E4M3", "F8_E8M0", "U8"):
        raise misfit(values, scale)
    if factor is not None and factor.elements != 1:
        raise misfit(values, scale)


_RULES: Final = (
    _stacked_mxfp4,
    packed_by_compressed_tensors,
    packed_by_gptq,
    packed_by_awq,
    packed_by_hqq,
    packed_by_torchao,
    packed_by_quark,
    packed_by_bitnet,
    _packed_fp4,
    _plain_fp4,
    bitsandbytes_4bit,
    bitsandbytes_8bit,
    bytes_of_torchao,
    scaled_bytes,
)
"""The first rule that recognises a tensor decides."""
