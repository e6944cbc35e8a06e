"""Puts tensors of towers together that are several in the file and one in transformers.

Each function undoes what a class of llama.cpp's converter did, which its docstring names. It gets
the tensors in the order of `Join.parts`, and the sizes of the metadata.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from nf4conv.sources.gguf.families.family import Piece, Stack
from nf4conv.sources.gguf.families.steps.joining import count_matrices, matrix_of
from nf4conv.sources.gguf.header import GgufTensor

_Parts: TypeAlias = Sequence[GgufTensor]
_Sizes: TypeAlias = Mapping[str, Any]


def join_attention(parts: _Parts, _sizes: _Sizes) -> Stack:
    """Returns the rows of queries, keys and values one after the other; of biases, the elements.

    Source: Qwen2VLVisionModel.
    """
    shape = _common_shape(parts)
    if len(shape) not in (1, 2):
        raise ValueError(f"is of shape {list(shape)}, and neither a matrix nor a bias")
    rows = len(parts) * shape[0]
    group = tuple(map(Piece, parts))
    return Stack((group,), (rows, *shape[1:]))


def join_frames(parts: _Parts, _sizes: _Sizes) -> Stack:
    """Returns [out, channels, frames, height, width] of one [out, channels, height, width] a frame.

    Source: Qwen2VLVisionModel, which takes patch_embed.proj apart.
    """
    shape = _common_shape(parts)
    if len(shape) != 4:
        raise ValueError(f"is of shape {list(shape)}, and no convolution")
    outputs, channels, height, width = shape
    kernels = outputs * channels
    pieces = []
    for part in parts:
        if part.block_type.values > 1:
            raise ValueError(f"is a convolution in blocks of {part.block_type.name}")
        as_rows = replace(part, shape=(kernels, height * width))
        pieces.append(Piece(as_rows))
    joined = (outputs, channels, len(parts), height, width)
    return Stack((tuple(pieces),), joined, is_interleaved=True)


def join_patches(parts: _Parts, _sizes: _Sizes) -> Stack:
    """Returns [out, height · width · channels] of [out, channels, height, width].

    Source: Gemma4VisionAudioModel of llama.cpp's converter, which makes the matrix a convolution.
    """
    [part] = parts
    if len(part.shape) != 4 or part.block_type.values > 1:
        raise ValueError(f"is of shape {list(part.shape)}, and no convolution")
    outputs, channels, height, width = part.shape
    as_matrices = replace(part, shape=(outputs, channels, height * width))
    count = count_matrices(as_matrices)
    groups = [(Piece(matrix_of(as_matrices, output)),) for output in range(count)]
    return Stack(tuple(groups), (outputs, channels * height * width), is_transposed=True)


def _common_shape(parts: _Parts) -> tuple[int, ...]:
    """Returns the shape of parts that are alike."""
    shape = parts[0].shape
    for part in parts:
        if part.shape != shape:
            raise ValueError(f"goes with {part.name}, which has another shape")
    return shape
