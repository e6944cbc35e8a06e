"""Decodes the blocks of llama.cpp's GGUF files, exactly as the Python package `gguf` does.

A block holds 32 or 256 neighbouring values of a row: a scale in half precision, and codes of a few
bits. The layouts are those of ggml-common.h and ggml-quants.c in llama.cpp; every function computes
in float32, in the order of `gguf.quants`, so that no bit differs. The package itself decodes
the types that few files have, on a CPU. What llama.cpp's converter did to weights (the classes in
its folder conversion/) is undone here, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from nf4conv.codec.decode.scaled import chunk_size
from nf4conv.errors import CodecError
from nf4conv.format.gguf import (
    BY_NAME,
    FUSED,
    NEGATIVE_EXP,
    NUMBERS,
    PLUS_ONE,
    ROTARY,
    TILED,
    TRANSPOSED,
)


def decode_ggml(values: torch.Tensor, block_type: str, dtype: torch.dtype) -> torch.Tensor:
    """Decodes rows of blocks, [..., bytes] uint8, of a type of llama.cpp to [..., values] `dtype`,
    to which float32 values are rounded once.

    Raises CodecError if a row is no whole number of blocks.
    """
    number = NUMBERS[block_type]
    _, values_of_block, size = BY_NAME[block_type]
    if values.shape[-1] % size != 0:
        raise CodecError(f"{values.shape[-1]} bytes are no whole number of blocks of {block_type}")
    columns = values.shape[-1] // size * values_of_block
    shape = (*values.shape[:-1], columns)
    decode = DECODERS.get(block_type) or partial(_decode_by_package, number)
    blocks = values.reshape(-1, size)
    out = torch.empty((len(blocks), values_of_block), dtype=dtype, device=values.device)
    step = chunk_size(values.device) // values_of_block
    for start in range(0, len(blocks), step):
        out[start : start + step] = decode(blocks[start : start + step])
    return out.view(shape)


def _decode_by_package(number: int, blocks: torch.Tensor) -> torch.Tensor:
    """Decodes blocks of a type that few files have: [n, bytes] uint8 → [n, values] float32."""
    import gguf  # an extra of nf4conv, which takes 0.2 s to import
    import numpy as np

    kind = gguf.GGMLQuantizationType(number)
    with np.errstate(all="ignore"):  # scales of any bits
        return torch.from_numpy(gguf.quants.dequantize(blocks.cpu().numpy(), kind))


# --- what the converter did -----------------------------------------------------------------------


def undo_change(
    values: torch.Tensor, change: str, heads: int, key_value_heads: int
) -> torch.Tensor:
    """Returns a weight, [rows] or [rows, columns], as it was before the converter changed it.

    `heads` are those that rows are divided into; of fused rows, those of the queries; of tiled
    columns, those of the keys. `key_value_heads` are those of fused keys and of fused values; of
    tiled columns, the heads that share a key. The result is in float32 after arithmetic.
    """
    if change == ROTARY:
        halves = values.view(heads, -1, 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)
    if change == FUSED:
        return _undo_fused(values, heads, key_value_heads)
    if change == TILED:
        by_number = values.view(values.shape[0], key_value_heads, heads, -1)
        return by_number.transpose(1, 2).reshape(values.shape)
    if change == TRANSPOSED:
        return values.t().contiguous()
    if change == PLUS_ONE:
        return values.float() - 1
    if change == NEGATIVE_EXP:
        return torch.log(-values.float())
    raise AssertionError(change)


def _undo_fused(values: torch.Tensor, heads: int, key_value_heads: int) -> torch.Tensor:
    """Returns rows in groups: the queries that share a key and a value, that key, that value."""
    size = values.shape[0] // (heads + 2 * key_value_heads)
    rest = values.shape[1:]
    queries, keys, values_of_heads = torch.split(
        values, [heads * size, key_value_heads * size, key_value_heads * size]
    )
    groups = [
        queries.reshape(key_value_heads, -1, size, *rest),
        keys.reshape(key_value_heads, 1, size, *rest),
        values_of_heads.reshape(key_value_heads, 1, size, *rest),
    ]
    return torch.cat(groups, dim=1).reshape(values.shape)


# --- decoders: [n, bytes of a block] uint8 → [n, values of a block] float32 -----------------------


def _decode_q4_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 16 bytes of codes]: scale * (code - 8)."""
    scale, packed = _parts(block, 2, 16)
    codes = _fields(packed, 4, 16).float()
    centred = codes - 8
    return _halves(scale) * centred


def _decode_q4_1(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 16 bytes of codes]: scale * code + minimum."""
    scale, minimum, packed = _parts(block, 2, 2, 16)
    codes = _fields(packed, 4, 16).float()
    products = _halves(scale) * codes
    return products + _halves(minimum)


def _decode_q5_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 high bits | 16 bytes of low bits]: scale * (code - 16)."""
    scale, high, low = _parts(block, 2, 4, 16)
    codes = _five_bits(high, low)
    return _halves(scale) * (codes - 16)


def _decode_q5_1(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 32 high bits | 16 bytes of low bits]: scale * code + minimum."""
    scale, minimum, high, low = _parts(block, 2, 2, 4, 16)
    codes = _five_bits(high, low)
    products = _halves(scale) * codes
    return products + _halves(minimum)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Puts the fifth bits above the other four; returns codes as float32."""
    fifth = _fields(high, 1, 1)
    codes = _fields(low, 4, 16) | fifth << 4
    return codes.float()


def _decode_q8_0(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | 32 int8]."""
    scale, codes = _parts(block, 2, 32)
    return _signed(codes) * _halves(scale)


def _decode_q2_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [16 scales and minimums of 4 bits | 64 bytes of codes | scale | minimum]."""
    nested, packed, scale, minimum = _parts(block, 16, 64, 2, 2)
    codes = _fields(packed, 2, 32).float()
    scales = (nested & 15).float()
    minimums = (nested >> 4).float()
    values = _scaled(scale, scales, codes)
    return _less(values, minimum, minimums)


def _decode_q3_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [32 bytes of high bits | 64 of low bits | 16 scales of 6 bits | scale].

    The high bit counts upside down: 4 is subtracted where it is 0.
    """
    high, low, low_scales, high_scales, scale = _parts(block, 32, 64, 8, 4, 2)
    high_bits = _fields(high_scales, 2, 4) << 4
    scales = _fields(low_scales, 4, 8) | high_bits
    codes = _fields(low, 2, 32).float()
    missing = 1 - _fields(high, 1, 32).float()
    codes = codes - 4 * missing
    return _scaled(scale, scales.float() - 32, codes)


def _decode_q4_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [scale | minimum | 12 bytes of scales and minimums | 128 bytes of codes]."""
    scale, minimum, nested, packed = _parts(block, 2, 2, 12, 128)
    scales, minimums = _scales_and_minimums(nested)
    codes = _fields(packed, 4, 32)
    values = _scaled(scale, scales, codes.float())
    return _less(values, minimum, minimums)


def _decode_q5_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes what Q4_K has, with 32 bytes of fifth bits before the codes."""
    scale, minimum, nested, high, low = _parts(block, 2, 2, 12, 32, 128)
    scales, minimums = _scales_and_minimums(nested)
    fifth = _fields(high, 1, 32) << 4
    codes = _fields(low, 4, 32) | fifth
    values = _scaled(scale, scales, codes.float())
    return _less(values, minimum, minimums)


def _decode_q6_k(block: torch.Tensor) -> torch.Tensor:
    """Decodes [128 bytes of low bits | 64 of high bits | 16 int8 scales | scale]."""
    low, high, nested, scale = _parts(block, 128, 64, 16, 2)
    high_bits = _fields(high, 2, 32) << 4
    codes = _fields(low, 4, 64) | high_bits
    return _scaled(scale, _signed(nested), codes.float() - 32)


def _scales_and_minimums(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Takes 8 scales and 8 minimums of 6 bits each out of 12 bytes: [n, 8] float32 both.

    The first four are whole in bytes 0 to 7. The other four have their low bits in bytes 8 to 11
    and their high bits above the first four.
    """
    first, second, mixed = _parts(packed, 4, 4, 4)
    high_of_scales = first >> 2 & 48
    high_of_minimums = second >> 2 & 48
    last_scales = mixed & 15 | high_of_scales
    last_minimums = mixed >> 4 | high_of_minimums
    scales = torch.cat([first & 63, last_scales], dim=1)
    minimums = torch.cat([second & 63, last_minimums], dim=1)
    return scales.float(), minimums.float()


def _scaled(
    scale: torch.Tensor,
    scales: torch.Tensor,
    codes: torch.Tensor,
) -> torch.Tensor:
    """Multiplies codes, [n, 256] float32, with the scales of their groups: [n, groups], times that
    of each block, [n, 2] bytes in half precision.
    """
    factors = _halves(scale) * scales
    grouped = codes.view(*scales.shape, -1)
    products = factors.unsqueeze(2) * grouped
    return products.flatten(1)


def _less(
    values: torch.Tensor,
    minimum: torch.Tensor,
    minimums: torch.Tensor,
) -> torch.Tensor:
    """Subtracts the minimums of groups, which are nested like their scales."""
    subtracted = _halves(minimum) * minimums
    grouped = values.view(*minimums.shape, -1)
    differences = grouped - subtracted.unsqueeze(2)
    return differences.flatten(1)


DECODERS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q8_0": _decode_q8_0,
    "Q2_K": _decode_q2_k,
    "Q3_K": _decode_q3_k,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
"""The decoder of each type that nf4conv decodes itself."""


# --- bytes of blocks: a row for each block --------------------------------------------------------


def _parts(block: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """Divides blocks into their parts, by the bytes that each part has."""
    return list(torch.split(block, list(sizes), dim=1))


def _fields(block: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Takes fields of 1, 2 or 4 bits out of bytes: [n, k] uint8 become [n, k * 8 / bits].

    A run of bytes holds the lowest field of each byte first, then the second field of each byte,
    and so on; runs, of which k is a multiple, follow each other.
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=block.device)
    runs = block.reshape(len(block), -1, 1, run)
    shifted = runs >> shifts.view(-1, 1)
    mask = 2**bits - 1
    found: torch.Tensor = shifted & mask
    return found.flatten(1)


def _halves(block: torch.Tensor) -> torch.Tensor:
    """Returns numbers in half precision as float32: [n, 2k] uint8 → [n, k]."""
    return block.contiguous().view(torch.float16).float()


def _signed(block: torch.Tensor) -> torch.Tensor:
    """Returns int8 numbers as float32: [n, k] uint8 → [n, k]."""
    return block.contiguous().view(torch.int8).float()
