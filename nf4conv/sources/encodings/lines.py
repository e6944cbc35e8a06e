"""Cuts tensors that are stored as they are along their first dimension."""

from nf4conv.sources.tensors import TensorInfo


def cut_rows(part: TensorInfo, first: int, last: int) -> TensorInfo:
    """Cuts along the first dimension of a tensor that is stored as it is."""
    size = part.nbytes // part.shape[0]
    return part._replace(
        shape=(last - first, *part.shape[1:]),
        start=part.start + first * size,
        stop=part.start + last * size,
    )
