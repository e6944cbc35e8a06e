"""Cuts runs of elements out of weights that bitsandbytes packed.

A run begins at a multiple of 256 blocks, which share one nested_absmax.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.layout import block_count
from nf4conv.sources.encodings.cuts.lines import cut_elements
from nf4conv.sources.encodings.types.bitsandbytes import packed_in_order
from nf4conv.sources.tensors import TensorInfo


def packed_part(tensor: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Cuts a run of elements out of a weight that bitsandbytes packed.

    Args:
        tensor: a weight for which `packed_in_order` returns an encoding.
        start: the first element, a multiple of 256 blocks.
        stop: the element after the last one, a multiple of 256 blocks or the end of the weight.

    Returns:
        The run, still packed, of shape [stop - start].
    """
    encoding = packed_in_order(tensor)
    assert encoding is not None
    cut = cut_parts(dict(encoding.parts), encoding.blocksize, start, stop)
    run = replace(
        encoding,
        values=cut["values"],
        absmax=cut["absmax"],
        nested_absmax=cut.get("nested_absmax"),
    )
    return tensor._replace(shape=(stop - start,), encoding=run)


def packed_spans(elements: int, blocksize: int, most: int, unit: int = 1) -> list[tuple[int, int]]:
    """Divides the elements of a packed weight into runs that can be decoded one by one.

    Args:
        elements: how many the weight has.
        blocksize: elements that share one absmax.
        most: elements of a run at most; but a run has at least 256 blocks, which share one
            nested_absmax, and at least one unit.
        unit: every run begins at a multiple of so many elements.

    Returns:
        (start, stop) of each run, in elements.
    """
    together = math.lcm(unit, blocksize * NESTED_BLOCKSIZE)
    step = max(most - most % together, together)
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def cut_parts(
    parts: Mapping[str, TensorInfo], blocksize: int, start: int, stop: int
) -> dict[str, TensorInfo]:
    """Cuts the parts of a packed weight to what decoding elements start … stop takes.

    Args:
        parts: the tensors of the weight by role: "values", and the suffixes of the components.
        blocksize: elements that share one absmax.
        start: the first element, a multiple of 256 blocks.
        stop: the element after the last one, a multiple of 256 blocks or the end of the weight.

    Returns:
        The parts by role. The values are bytes, whatever dtype they are stored in; the maps and the
        quant state stay whole.
    """
    first_block = start // blocksize
    last_block = block_count(stop, blocksize)
    found = dict(parts)
    found["values"] = cut_elements(parts["values"]._replace(dtype="U8"), start // 2, -(-stop // 2))
    if "absmax" in parts:
        found["absmax"] = cut_elements(parts["absmax"], first_block, last_block)
    if "nested_absmax" in parts:
        found["nested_absmax"] = cut_elements(
            parts["nested_absmax"],
            first_block // NESTED_BLOCKSIZE,
            block_count(last_block, NESTED_BLOCKSIZE),
        )
    return found
