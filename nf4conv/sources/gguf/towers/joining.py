"""Puts tensors of towers together that are several in the file and one in transformers.

Each function undoes what a class of llama.cpp's converter did, which its docstring names. It gets
the tensors in the order of `Join.parts`, and the sizes of the metadata.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nf4conv.sources.gguf.families.family import Piece, Stack
from nf4conv.sources.gguf.header import GgufTensor


def join_attention(parts: Sequence[GgufTensor], _sizes: Mapping[str, Any]) -> Stack:
    """Returns the rows of queries, keys and values one after the other; of biases, the elements.

    Source: Qwen2VLVisionModel.
    """
    shapes = {part.shape for part in parts}
    if len(shapes) != 1 or len(parts[0].shape) not in (1, 2):
        raise ValueError("is not of the shape of the other queries, keys and values of its layer")
    rows, *columns = parts[0].shape
    group = tuple(Piece(part) for part in parts)
    return Stack((group,), (len(parts) * rows, *columns))


def join_frames(parts: Sequence[GgufTensor], _sizes: Mapping[str, Any]) -> Stack:
    """Returns [out, channels, frames, height, width] of one [out, channels, height, width] a frame.

    Source: Qwen2VLVisionModel, which takes patch_embed.proj apart.
    """
    shapes = {part.shape for part in parts}
    if len(shapes) != 1 or len(parts[0].shape) != 4:
        raise ValueError("is no convolution of the shape of the other frame's")
    outputs, channels, *patch = parts[0].shape
    pieces = []
    for part in parts:
        if part.block_type.values > 1:
            raise ValueError(f"is a convolution in blocks of {part.block_type.name}")
        kernels = replace(part, shape=(outputs * channels, math.prod(patch)))
        pieces.append(Piece(kernels))
    shape = (outputs, channels, len(parts), *patch)
    return Stack((tuple(pieces),), shape, is_interleaved=True)
