"""Recognises weights of BitNet.

    W   U8 [rows / 4, columns]   W_scale, one value

BitLinear of transformers divides its results by the scale, and AutoBitLinear multiplies them with
it: both are in integrations/bitnet.py of release 5.23.
"""

from typing import Final

from nf4conv.errors import SourceError
from nf4conv.sources.encodings.refused import DIVIDING
from nf4conv.sources.encodings.siblings import SiblingTensors, misfit
from nf4conv.sources.encodings.types.ternary import Ternary
from nf4conv.sources.tensors import TensorInfo

_SCALE_DTYPES: Final = ("F16", "BF16", "F32")


def packed_by_bitnet(tensor: TensorInfo, siblings: SiblingTensors) -> TensorInfo | None:
    """Recognises a weight of BitNet: a code of 2 bits for each of four rows in a byte."""
    if siblings.description.method != "bitnet" or tensor.dtype != "U8":
        return None
    scale = siblings.find(f"{tensor.name}_scale")
    if scale is None:
        raise SourceError.about(
            tensor.file,
            tensor.name,
            "lacks its weight_scale, without which it cannot be decoded",
        )
    is_matrix = len(tensor.shape) == 2 and 0 not in tensor.shape
    if not is_matrix or scale.elements != 1 or scale.dtype not in _SCALE_DTYPES:
        raise misfit(tensor, scale)
    lines, columns = tensor.shape
    encoding = Ternary(
        codes=tensor,
        scale=scale,
        is_divided=siblings.description.packing == DIVIDING,
        rows=4 * lines,
    )
    return tensor._replace(shape=(4 * lines, columns), dtype=siblings.dtype, encoding=encoding)
