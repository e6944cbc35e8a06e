"""Decodes weights of HQQ: one pass, one launch.

The arithmetic, and how codes lie in words, is that of codec/decode/halves.py.
"""

import torch
import triton.language as tl

from nf4conv.codec.kernels.launch import Launcher, kernel

TILE = tl.constexpr(2048)  # elements that a program decodes
NUM_WARPS = 4


def decode_halves(
    words: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    after: torch.Tensor | None,
    bits: int,
    axis: int,
    numbers: tuple[int, ...],
    out: torch.Tensor,
) -> None:
    """Decodes a run of the elements of a weight; all tensors are contiguous.

    Args:
        words: [words] uint8, or int32 of 3 bits: all, or those of the first part of the run.
        scale: [groups] float32, float16 or bfloat16.
        zero: [groups], in the same dtype.
        after: the first words of the weight; None if the run takes no two runs of words.
        bits: of a code: 1, 2, 3, 4 or 8.
        axis: 1 if groups are runs of elements, 0 if their elements are at equal distances.
        numbers: the kernel's scalars.
        out: [elements] float32, float16 or bfloat16, written.
    """
    if out.numel() == 0:
        return
    goes_on = after is not None
    if after is None:
        after = words  # which is not read
    programs = -(-out.numel() // TILE.value)
    arguments = (words, after, scale, zero, out, *numbers)
    dtypes = (words.dtype, scale.dtype, out.dtype)
    _launch(programs, arguments, (bits, axis, goes_on), dtypes, NUM_WARPS)


@kernel
def halves_kernel(
    words_ptr,
    after_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    elements: tl.int64,
    first: tl.int64,
    words: tl.int64,
    first_word: tl.int64,
    distance: tl.int64,
    first_group: tl.int64,
    BITS: tl.constexpr,
    AXIS: tl.constexpr,
    GOES_ON: tl.constexpr,
):
    """Decodes TILE elements.

    Pointers to tensors:
        words_ptr: [...] uint8, or int32 of 3 bits: words from `first_word` on.
        after_ptr: [...] the words from the first one on; read where GOES_ON.
        scale_ptr, zero_ptr: [...] float32, float16 or bfloat16, from `first_group` on.
        out_ptr: [elements] float32, float16 or bfloat16, written.

    Scalars:
        first: elements of the weight before those that are decoded.
        words: of the weight, each with a code of each part; fewer than 2^31.
        distance: elements of a group; of axis 0, elements from one of a group to the next.

    Constexprs:
        GOES_ON: True if elements of the next part have their words at `after_ptr`.
    """
    IN_WORD: tl.constexpr = 10 if BITS == 3 else 8 // BITS
    start = tl.program_id(0).to(tl.int64) * TILE
    offset = tl.arange(0, TILE)
    place = start + offset
    inside = place < elements
    start += first
    # one long division for all; those of each element are of 32 bits
    word = (start % words).to(tl.int32) + offset
    part = (start // words).to(tl.int32) + word // words.to(tl.int32)
    word = word % words.to(tl.int32)
    if GOES_ON:
        is_after = part > first // words
        words_ptr -= first_word
        stored = tl.load(words_ptr + word, mask=inside & ~is_after, other=0)
        after = tl.load(after_ptr + word, mask=inside & is_after, other=0)
        stored = tl.where(is_after, after, stored)
    else:
        stored = tl.load(words_ptr - first_word + word, mask=inside, other=0)
    shift = BITS * (IN_WORD - 1 - part)
    code = (stored.to(tl.int32) >> shift) & ((1 << BITS) - 1)
    group = (start % distance).to(tl.int32) + offset
    if AXIS == 1:
        group = group // distance.to(tl.int32)
        before = start // distance - first_group
    else:
        group = group % distance.to(tl.int32)
        before = 0
    scale = tl.load(scale_ptr + before + group, mask=inside, other=0)
    zero = tl.load(zero_ptr + before + group, mask=inside, other=0)
    difference = (code.to(tl.float32) - zero.to(tl.float32)).to(scale.dtype)
    value = (difference.to(tl.float32) * scale.to(tl.float32)).to(scale.dtype)
    tl.store(out_ptr + place, value.to(out_ptr.dtype.element_ty), mask=inside)


_launch = Launcher(halves_kernel)
