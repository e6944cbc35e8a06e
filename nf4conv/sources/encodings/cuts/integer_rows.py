"""Cuts rows out of weights of packed integers.

The words of GPTQ and AWQ do not lie row by row: rows of such a weight are columns of its tensors.
Whoever takes its pieces one after the other reads these tensors once, if there is room for them;
otherwise a piece is read in one run for each line of the file.
"""

from dataclasses import replace

from nf4conv.sources.encodings.cuts.lines import cut_rows
from nf4conv.sources.encodings.types.arranged import Columns
from nf4conv.sources.encodings.types.integers import PackedIntegers, words_of
from nf4conv.sources.tensors import TensorInfo


def integer_rows(encoding: PackedIntegers, start: int, stop: int) -> PackedIntegers:
    """Returns the encoding of rows start … stop.

    Args:
        encoding: of a weight that is not transposed.
        start: a multiple of `encoding.rows_together`.
        stop: another one, or the end of the weight.
    """
    first_word = words_of(start, encoding.bits, is_padded=encoding.is_padded)
    last_word = words_of(stop, encoding.bits, is_padded=encoding.is_padded)
    zeros = encoding.zeros
    if encoding.packing == "compressed-tensors":
        if zeros is not None and zeros.dtype == "I8":
            zeros = cut_rows(zeros, start, stop)
        elif zeros is not None:
            zeros = cut_rows(zeros, first_word, last_word)
        values = cut_rows(encoding.values, start, stop)
        return replace(
            encoding, values=values, scale=cut_rows(encoding.scale, start, stop), zeros=zeros
        )
    if encoding.packing == "torchao":
        values = cut_rows(encoding.values, start, stop)
        if zeros is not None:
            zeros = _columns(zeros, start, stop)
        return replace(
            encoding, values=values, scale=_columns(encoding.scale, start, stop), zeros=zeros
        )
    if zeros is not None:
        zeros = _columns(zeros, first_word, last_word)
    if encoding.packing == "GPTQ":
        values = _columns(encoding.values, start, stop)
    else:
        values = _columns(encoding.values, first_word, last_word)
    return replace(
        encoding, values=values, scale=_columns(encoding.scale, start, stop), zeros=zeros
    )


def _columns(part: TensorInfo, first: int, last: int) -> TensorInfo:
    """Cuts columns out of a matrix that is stored as it is."""
    if (first, last) == (0, part.shape[1]):
        return part
    if isinstance(part.encoding, Columns):
        before = part.encoding.first
        cut = Columns(part.encoding.values, before + first, before + last)
    else:
        cut = Columns(part, first, last)
    return part._replace(shape=(part.shape[0], last - first), encoding=cut)
