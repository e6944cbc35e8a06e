"""Weights of HQQ: codes of 1, 2, 3, 4 or 8 bits, whose words hold a code of each part of a weight.

    value = (code - zero) * scale, rounded to the dtype of the scales after each step

The elements of a weight are divided into as many parts as a word has codes. The first word holds
the first code of each part, that of the first part in its highest bits. Groups are runs of elements
(axis 1) or elements at equal distances (axis 0): Quantizer.dequantize of hqq 0.2.8.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.codec.backends import has_kernels

_CHUNK: Final = 2**18
"""Elements that are decoded at a time on the CPU."""

_KERNEL_WORDS: Final = 2**31
"""The kernel takes weights of fewer words."""


@dataclass(frozen=True)
class HalvesLayout:
    """Describes a run of the elements of a weight, and how its codes lie.

    Attributes:
        bits: of a code: 1, 2, 3, 4 or 8.
        axis: 1 if groups are runs of elements, 0 if their elements are at equal distances.
        group_size: elements of a group.
        groups: of the whole weight.
        words: of the whole weight.
        first: elements of the weight before those that are decoded.
        elements: how many are decoded.
        first_word: words of the weight before the first one that is given.
        first_group: groups of the weight before the first one that is given.
    """

    bits: int
    axis: int
    group_size: int
    groups: int
    words: int
    first: int
    elements: int
    first_word: int
    first_group: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns the scalars of the kernel that decodes it."""
        distance = self.group_size if self.axis == 1 else self.groups
        return (
            self.elements,
            self.first,
            self.words,
            self.first_word,
            distance,
            self.first_group,
        )


def decode_halves(
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    layout: HalvesLayout,
    dtype: torch.dtype,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decodes a run of the elements of a weight.

    Args:
        words: uint8, or int32 of 3 bits: all, or those of the elements in the first part.
        scale: a float16, bfloat16 or float32 for each group of the run.
        zero: the zero point of each group, no whole number, in the same dtype.
        layout: what is decoded.
        dtype: of the result.
        after: the first words, if the elements go on in the next part and not all words are given.

    Returns:
        [elements] `dtype`.
    """
    words = words.reshape(-1)
    scale = scale.reshape(-1)
    zero = zero.reshape(-1)
    out = torch.empty(layout.elements, dtype=dtype, device=words.device)
    if has_kernels(words.device) and layout.words < _KERNEL_WORDS:
        from nf4conv.codec.kernels.decoding import halves  # importing Triton takes a second

        halves.decode_halves(
            words, scale, zero, after, layout.bits, layout.axis, layout.numbers, out
        )
        return out
    for start, stop in _spans(layout):
        codes = _codes(words, after, layout, start, stop).to(scale.dtype)
        run = slice(start - layout.first, stop - layout.first)
        out[run] = _decoded(codes, scale, zero, layout, start)
    return out


def _spans(layout: HalvesLayout) -> Iterator[tuple[int, int]]:
    """Yields the runs that are decoded at a time.

    Each is of one part. Its groups follow each other: of axis 0 it has no two elements of a group,
    of axis 1 only the first group and the last one may be cut.
    """
    start = layout.first
    end = layout.first + layout.elements
    length = layout.groups
    if layout.axis == 1:
        length = max(_CHUNK - _CHUNK % layout.group_size, layout.group_size)
    while start < end:
        stop = min(end, start - start % layout.words + layout.words)
        stop = min(stop, start - start % length + length)
        yield start, stop
        start = stop


def _codes(
    words: torch.Tensor,
    after: torch.Tensor | None,
    layout: HalvesLayout,
    start: int,
    stop: int,
) -> torch.Tensor:
    """Returns the codes of some elements of one part, in the dtype of the words."""
    part, first = divmod(start, layout.words)
    if after is not None and part > layout.first // layout.words:
        run = after[first : first + stop - start]
    else:
        first -= layout.first_word
        run = words[first : first + stop - start]
    if layout.bits == 8:
        return run
    in_word = 10 if layout.bits == 3 else 8 // layout.bits  # 3 bits leave two bits of a word
    shifted = run >> layout.bits * (in_word - 1 - part)
    codes: torch.Tensor = shifted & 2**layout.bits - 1
    return codes


def _decoded(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    layout: HalvesLayout,
    start: int,
) -> torch.Tensor:
    """Returns values, given their codes in the dtype of the scales: a span, see `_spans`."""
    count = len(codes)
    if layout.axis == 0:
        group = start % layout.groups
        run = slice(group, group + count)
        return (codes - zero[run]) * scale[run]
    size = layout.group_size
    group, before = divmod(start, size)
    stop = -(-(start + count) // size)
    run = slice(group - layout.first_group, stop - layout.first_group)
    padded = codes
    if before or count % size:
        padded = codes.new_zeros((stop - group) * size)
        padded[before : before + count] = codes
    values = (padded.view(-1, size) - zero[run, None]) * scale[run, None]
    return values.view(-1)[before : before + count]
