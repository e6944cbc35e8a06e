"""Recognises 8-bit values with scales: FP8 and INT8 of all who write them, and those of torchao."""

from collections.abc import Sequence
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.models.module_names import module_of
from nf4conv.sources.encodings.description import Block
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.scaled import Scaled
from nf4conv.sources.tensors import TensorInfo

FLOAT8_DTYPES: Final = ("F8_E4M3", "F8_E5M2")


def scaled_bytes(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises 8-bit values with scales, and FP8 values without any."""
    scale = siblings.find(*scale_names(tensor.name))
    if tensor.dtype not in (*FLOAT8_DTYPES, "I8"):
        return None
    if scale is None and tensor.dtype == "I8":
        return None
    if scale is None and siblings.description.method is not None:
        raise SourceError.about(
            tensor.file,
            tensor.name,
            f"{tensor.dtype} without a scale; the checkpoint is incomplete",
        )
    block = None
    if scale is not None:
        if siblings.description.method == "fbgemm_fp8":
            scale = _scale_of_columns(tensor, scale)
        block = _block_of_scale(tensor, scale, siblings.description.blocks)
    zero = _zero(tensor, scale, siblings.find(f"{tensor.name}_zero_point"))
    return tensor._replace(dtype=siblings.dtype, encoding=Scaled(tensor, scale, block, zero))


def _scale_of_columns(tensor: TensorInfo, scale: TensorInfo) -> TensorInfo:
    """Returns the scales of stacked experts in the shape that says what they scale.

    FbgemmFp8Quantize in integrations/fbgemm_fp8.py of transformers 5.23 scales the columns of
    down_proj of Llama 4, [experts, in, out], and stores the scales as [experts, out, 1].
    """
    if len(tensor.shape) != 3:
        return scale
    experts, _, columns = tensor.shape
    if scale.shape != (experts, columns, 1):
        return scale
    return scale._replace(shape=(experts, 1, columns))


def bytes_of_torchao(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of torchao: P._weight_qdata, P._weight_scale, P._weight_zero_point.

    These are the fields of Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor of torchao 0.18,
    named as in its prototype/safetensors/safetensors_support.py. Its other classes have fields of
    the same names, so the config was asked before (refused.py), and packed_by_torchao.
    """
    stored = tensor.name.removesuffix("_qdata")
    module, is_field, weight = stored.rpartition("._")
    if siblings.description.method != "torchao" or stored == tensor.name or not is_field:
        return None
    scale = siblings.find(f"{stored}_scale")
    is_matrix = len(tensor.shape) == 2 and tensor.dtype in (*FLOAT8_DTYPES, "I8")
    if scale is None or not is_matrix:
        raise misfit(tensor, scale or tensor)
    columns = tensor.shape[1]
    groups = scale.shape[-1] if len(scale.shape) == 2 else 0
    blocks = []
    if groups > 0 and columns % groups == 0:
        blocks.append((1, columns // groups))
    block = _block_of_scale(tensor, scale, blocks)
    zero = _zero(tensor, scale, siblings.find(f"{stored}_zero_point"))
    return tensor._replace(
        name=f"{module}.{weight}",
        dtype=siblings.dtype,
        encoding=Scaled(tensor, scale, block, zero, siblings.description.bits_in_bytes),
    )


def _zero(
    tensor: TensorInfo, scale: TensorInfo | None, zero: TensorInfo | None
) -> TensorInfo | None:
    """Returns the zero points of a matrix of int8 once they are checked; None if there are none."""
    if zero is None:
        return None
    if tensor.dtype != "I8" or zero.dtype != "I8" or len(tensor.shape) != 2:
        raise misfit(tensor, zero)
    if scale is None or zero.shape != scale.shape:
        raise misfit(tensor, zero)
    return zero


def scale_names(name: str) -> tuple[str, ...]:
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
        expected = (*stacked, -(-rows // height), -(-columns // width))
        if scale.shape == expected:
            height = min(height, max(rows, 1))
            width = min(width, max(columns, 1))
            return height, width
    if all(size in (1, whole) for size, whole in zip(scale.shape, tensor.shape, strict=True)):
        return None
    raise misfit(tensor, scale)
