"""Decodes the blocks of llama.cpp's GGUF files, exactly as the Python package `gguf` does.

A block holds 32 or 256 neighbouring values of a row: a scale in half precision, and codes of a few
bits. The layouts are those of ggml-common.h and ggml-quants.c in llama.cpp; every function computes
in float32, in the order of `gguf.quants`, so that no bit differs. The package itself decodes
the types that few files have, on a CPU. What llama.cpp's converter did to weights (the classes in
its folder conversion/) is undone here, too.
"""

import torch

from nf4conv.codec.decode.floats import chunks
from nf4conv.format.gguf import (
    BY_NAME,
    LAYOUTS,
    NEGATIVE_EXP,
    NIBBLES,
    PLUS_ONE,
    ROTARY,
    SIGNED,
    SPLIT,
    TILED,
    TRANSPOSED,
    Fields,
    Layout,
)


def decode_ggml(values: torch.Tensor, block_type: str, dtype: torch.dtype) -> torch.Tensor:
    """Decodes rows of blocks, [..., bytes] uint8, of a type of llama.cpp to [..., values] `dtype`,
    to which float32 values are rounded once. Rows are whole blocks.
    """
    number, _, values_of_block, size = BY_NAME[block_type]
    columns = values.shape[-1] // size * values_of_block
    blocks = values.reshape(-1, size)
    out = torch.empty((len(blocks), values_of_block), dtype=dtype, device=values.device)
    if block_type in LAYOUTS:
        _decode(LAYOUTS[block_type], blocks, out)
    else:
        _decode_by_package(number, blocks, out)
    return out.view(*values.shape[:-1], columns)


def _decode_by_package(number: int, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Decodes blocks of a type that few files have: [n, bytes] uint8 → [n, values]."""
    import gguf  # an extra of nf4conv, which takes 0.2 s to import
    import numpy as np

    kind = gguf.GGMLQuantizationType(number)
    for part in chunks(blocks, out.shape[1]):
        with np.errstate(all="ignore"):  # scales of any bits
            out[part] = torch.from_numpy(gguf.quants.dequantize(blocks[part].cpu().numpy(), kind))


# --- what the converter did -----------------------------------------------------------------------


def undo_change(values: torch.Tensor, change: str, heads: int, shared: int) -> torch.Tensor:
    """Returns a weight, [rows] or [rows, columns], as it was before the converter changed it.

    `heads` are those that rows are divided into; of tiled columns, those of the keys, each of which
    `shared` heads have in common. The result is in float32 after arithmetic.
    """
    if change == ROTARY:
        halves = values.view(heads, -1, 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)
    if change == TILED:
        by_number = values.view(values.shape[0], shared, heads, -1)
        return by_number.transpose(1, 2).reshape(values.shape)
    if change == TRANSPOSED:
        return values.t().contiguous()
    if change == PLUS_ONE:
        return values.float() - 1
    if change == NEGATIVE_EXP:
        return torch.log(-values.float())
    raise AssertionError(change)


# --- blocks: a row for each -----------------------------------------------------------------------


def _decode(layout: Layout, blocks: torch.Tensor, out: torch.Tensor) -> None:
    """Decodes blocks of a layout: [n, bytes] uint8 → [n, values]."""
    scales, minimums = _scales(layout, blocks)
    for part in chunks(blocks, out.shape[1]):
        decoded = _codes(layout, blocks[part])
        groups = decoded.view(len(decoded), scales.shape[1], -1)
        groups.mul_(scales[part].unsqueeze(2))
        if minimums is not None:
            subtract_or_add = groups.sub_ if layout.kind else groups.add_
            subtract_or_add(minimums[part].unsqueeze(2))
        out[part] = decoded


def _codes(layout: Layout, blocks: torch.Tensor) -> torch.Tensor:
    """Returns the codes of blocks, less their center: [n, bytes] uint8 → [n, values] float32."""
    codes = _fields(blocks, layout.low, layout)
    if layout.low.bits == 8:
        return codes.view(torch.int8).float()
    if layout.high.bits:
        codes |= _fields(blocks, layout.high, layout) << layout.low.bits
    if layout.center:
        codes = (codes - layout.center).view(torch.int8)
    return codes.float()


def _scales(layout: Layout, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scales and the minimums, if there are any: [n, groups] float32 both."""
    scale = _halves(blocks, layout.scale)
    minimum = _halves(blocks, layout.scale + 2) if layout.has_minimum else None
    if not layout.kind:
        return scale, minimum
    scales, minimums = _scales_of_groups(layout, blocks)
    if minimum is None or minimums is None:
        return scale * scales, None
    return scale * scales, minimum * minimums


def _scales_of_groups(
    layout: Layout, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scales and the minimums of groups: [n, groups] float32 both."""
    stored = blocks[:, layout.first : layout.first + 16]
    if layout.kind == SIGNED:
        return stored.contiguous().view(torch.int8).float(), None
    if layout.kind == NIBBLES:
        return (stored & 15).float(), (stored >> 4).float()
    if layout.kind == SPLIT:
        scales = _unpacked(stored[:, :8], 4, 8) | _unpacked(stored[:, 8:12], 2, 4) << 4
        return scales.float() - 32, None
    # the first four are whole in bytes 0 to 7; the other four have their low bits in bytes 8 to 11,
    # and their high bits above the first four
    first, second, mixed = stored[:, :4], stored[:, 4:8], stored[:, 8:12]
    scales = torch.cat([first & 63, mixed & 15 | first >> 2 & 48], dim=1)
    minimums = torch.cat([second & 63, mixed >> 4 | second >> 2 & 48], dim=1)
    return scales.float(), minimums.float()


def _fields(blocks: torch.Tensor, fields: Fields, layout: Layout) -> torch.Tensor:
    """Takes fields of a few bits out of blocks: [n, values] uint8."""
    values = 256 if layout.kind else 32
    stored = blocks[:, fields.first : fields.first + values * fields.bits // 8]
    return _unpacked(stored, fields.bits, fields.run)


def _unpacked(stored: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Takes fields of a few bits out of bytes, [n, k] → [n, k * 8 / bits], in runs of bytes."""
    if bits == 8:
        return stored.contiguous()
    runs = stored.reshape(len(stored), -1, run)
    fields = [runs >> shift & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(fields, dim=2).flatten(1)


def _halves(blocks: torch.Tensor, first: int) -> torch.Tensor:
    """Returns the numbers in half precision at a byte as float32: [n, 1]."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()
