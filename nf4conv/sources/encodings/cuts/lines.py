"""Cuts tensors that are stored as they are."""

from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.sources.tensors import TensorInfo


def cut_rows(part: TensorInfo, first: int, last: int) -> TensorInfo:
    """Cuts along the first dimension of a tensor that is stored as it is."""
    size = part.nbytes // part.shape[0]
    return part._replace(
        shape=(last - first, *part.shape[1:]),
        start=part.start + first * size,
        stop=part.start + last * size,
    )


def cut_elements(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Returns elements start … stop of a tensor that is stored as it is, in a flat shape."""
    bits = DTYPE_BITS[tensor.dtype]
    return tensor._replace(
        shape=(stop - start,),
        start=tensor.start + start * bits // 8,
        stop=tensor.start + -(-stop * bits // 8),
    )
