"""Integers of 1 to 8 bits, packed into words, times scales that groups of columns share.

    value = (code - zero) * scale, computed in float32 and rounded once

A code has so few bits that float32 holds its product with a 16-bit scale exactly. So the result is
the one that the methods compute in the dtype of their scales. A stream of codes begins in the
lowest bits of its first word; a code of 3, 5, 6 or 7 bits may run over the border of two words.

compressed-tensors  [rows, words]: a stream for each row. Zero points are packed along the rows,
                    or one int8 each, less 2^(bits - 1); PackedQuantizationCompressor of
                    compressed-tensors 0.20
GPTQ                [words, rows]: a stream down each column. Zero points [groups, words], one too
                    small in version 1, where loaders add 1 to whole words, carries included;
                    dequantize_weight of GPTQModel 7.7 and its convert_gptq_v1_to_v2_format
AWQ                 [columns, words]: 4 bits, each 8 codes in the order 0 2 4 6 1 3 5 7, of zero
                    points [groups, words] too; dequantize_gemm of AutoAWQ 0.2.9
torchao             [rows, bytes]: 4 bits, a stream of signed codes for each row. Zero points
                    [groups, rows] are floats, which are added: code * scale + zero, Int4Tensor of
                    torchao 0.18
"""

from functools import cache
from typing import Final

import torch

from nf4conv.codec.decode.floats import as_pairs, chunks, look_up
from nf4conv.errors import CodecError
from nf4conv.format.integers import WORD, IntegerLayout

_PLACES_IN_AWQ: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of 8 neighbouring codes of AWQ is."""


def decode_integers(
    values: torch.Tensor,
    scale: torch.Tensor,
    codes: IntegerLayout,
    dtype: torch.dtype,
    *,
    zeros: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decodes a matrix, or some rows of one, to [rows, columns] `dtype`, contiguous.

    values: the words, int32, of torchao bytes, in the shape of the packing. scale: [rows, groups]
    of compressed-tensors, [groups, rows] of the others. zeros: the zero point of each group,
    packed, or int8 or a float for each; None for 2^(bits - 1). group_index: [columns], the group of
    each column; None if groups are in order.

    Raises CodecError if the group index names a group that there is not.
    """
    if scale.dim() == 1:
        scale = scale.view(-1, 1)
    if codes.packing != "compressed-tensors":
        scale = scale.t()
    rows, groups = scale.shape
    index = _column_groups(group_index, codes, groups, values.device)
    out = torch.empty((rows, codes.columns), dtype=dtype, device=values.device)
    factors = scale.to(torch.float32).contiguous()
    zero_points = _zero_points(zeros, codes, rows)
    added = None
    if zeros is not None and zeros.is_floating_point():
        added = zeros.t().to(torch.float32).contiguous()
    width = min(codes.group_size, codes.columns)

    def of_columns(grid: torch.Tensor) -> torch.Tensor:
        return grid.unsqueeze(-1) if index is None else grid.index_select(1, index)

    for part in chunks(factors, codes.columns, WORD):
        decoded = _codes(values, part, codes)
        computed = decoded.view(len(decoded), -1, width) if index is None else decoded
        if zero_points is not None:
            computed.sub_(of_columns(zero_points[part]))
        computed.mul_(of_columns(factors[part]))
        if added is not None:
            computed.add_(of_columns(added[part]))
        out[part] = decoded
    return out


def _column_groups(
    group_index: torch.Tensor | None, layout: IntegerLayout, groups: int, device: torch.device
) -> torch.Tensor | None:
    """Returns the group of each column; None if all groups are whole and in order."""
    columns = layout.columns
    in_order = torch.arange(columns) // layout.group_size
    if group_index is not None and columns:
        index = group_index.to(torch.int64)
        least = int(index.min())
        # compressed-tensors has -1 where nothing was reordered
        is_unset = layout.packing == "compressed-tensors" and least == -1
        if not is_unset and (least < 0 or int(index.max()) >= groups):
            raise CodecError(f"its group index names a group that is none of its {groups}")
        if not is_unset and not torch.equal(index.cpu(), in_order):
            return index
    if columns and int(in_order[-1]) >= groups:
        raise CodecError(f"{groups} groups of {layout.group_size} for {columns} columns")
    if columns == groups * layout.group_size or groups == 1:
        return None
    return in_order.to(device)


def _codes(values: torch.Tensor, part: slice, layout: IntegerLayout) -> torch.Tensor:
    """Returns the codes of some rows less 2^(bits - 1), contiguous: [rows, columns] float32."""
    if layout.packing == "AWQ":
        words = values[:, part.start // 8 : -(-part.stop // 8)]
        return _centered(_interleaved(words)[: part.stop - part.start], layout)
    words = values[:, part].t() if layout.packing == "GPTQ" else values[part]
    words = words.contiguous()
    if layout.bits == 4:
        stored = words.view(-1).view(torch.uint8)
        codes = look_up(_pairs(layout, words.device), stored).view(len(words), -1)
    else:
        codes = _centered(unpack(words, layout.bits), layout)
    return codes[:, : layout.columns].contiguous()


def _centered(codes: torch.Tensor, layout: IntegerLayout) -> torch.Tensor:
    """Returns codes, uint8, less 2^(bits - 1), as float32; signed ones as they are."""
    middle = 1 << (layout.bits - 1)
    if layout.packing == "torchao":
        codes = codes ^ middle
    return (codes - middle).view(torch.int8).to(torch.float32)


@cache
def _pairs(layout: IntegerLayout, device: torch.device) -> torch.Tensor:
    """Returns what the two codes of 4 bits in each byte stand for."""
    return as_pairs(_centered(torch.arange(16, dtype=torch.uint8, device=device), layout))


def _interleaved(words: torch.Tensor) -> torch.Tensor:
    """Returns the codes of AWQ, [8 * words, lines] uint8, given [lines, words]."""
    words = words.t().contiguous()
    codes = torch.empty((len(words), 8, words.shape[1]), dtype=torch.uint8, device=words.device)
    for number, place in enumerate(_PLACES_IN_AWQ):
        codes[:, number] = words >> 4 * place & 15
    return codes.flatten(0, 1)


def _zero_points(
    zeros: torch.Tensor | None, layout: IntegerLayout, rows: int
) -> torch.Tensor | None:
    """Returns the zero points less 2^(bits - 1), [rows, groups] float32; None if all are that, or
    if they are added.
    """
    if zeros is None or zeros.is_floating_point():
        return None
    if zeros.dtype == torch.int8:
        return zeros.view(rows, -1).to(torch.float32)
    if layout.packing == "AWQ":
        found = _interleaved(zeros)
    elif layout.packing == "compressed-tensors":
        found = unpack(zeros.t().contiguous(), layout.bits).t()
    else:
        found = _gptq_zero_points(zeros, layout).t()
    return found[:rows].to(torch.float32).sub_(1 << (layout.bits - 1)).contiguous()


def _gptq_zero_points(zeros: torch.Tensor, layout: IntegerLayout) -> torch.Tensor:
    """Returns the zero points of GPTQ: [groups, rows] uint8."""
    bits = layout.bits
    if not layout.zeros_less_one:
        return unpack(zeros.contiguous(), bits)
    if WORD % bits != 0:  # codes cross the borders of words, so loaders add to each
        return (unpack(zeros.contiguous(), bits) + 1) & ((1 << bits) - 1)
    ones = sum(1 << place for place in range(0, WORD, bits))
    return unpack(zeros.contiguous() + ones, bits)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes of 1 to 8 bits in streams of words: [streams, words] int32, contiguous,
    become [streams, codes] uint8, with codes of 0 behind a last word that is not full.
    """
    if WORD % bits != 0 and words.shape[1] % bits != 0:  # the last words may be cut off
        words = torch.nn.functional.pad(words, (0, -words.shape[1] % bits))
    # a single word may have any stride
    raw = words.reshape(-1).view(torch.uint8).view(words.shape[0], 4 * words.shape[1])
    if bits == 8:
        return raw
    if 8 % bits == 0:
        mask = 2**bits - 1
        codes = [(raw >> shift) & mask for shift in range(0, 8, bits)]
        return torch.stack(codes, dim=-1).flatten(-2)
    return _unpack_across_bytes(raw, bits)


def _unpack_across_bytes(raw: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the codes of streams of bytes, of which every `bits` bytes hold 8 codes."""
    together = raw.view(*raw.shape[:-1], -1, bits).to(torch.int32)
    codes = []
    for number in range(8):
        byte, shift = divmod(number * bits, 8)
        window = together[..., byte]
        if shift + bits > 8:
            window = window | together[..., byte + 1] << 8
        codes.append((window >> shift & (2**bits - 1)).to(torch.uint8))
    return torch.stack(codes, dim=-1).flatten(-2)
