"""Dequantizers of others for the GPU benchmark: imported from their packages, or re-created from
public descriptions.

Unsloth's kernel is run from its own package if that is importable (`unsloth/kernels/nf4.py`, AGPL:
never copied here). The kernels of two public challenge entries are re-created from what their
authors describe: Weitkamp's V0 (absmax decoded by a launch of its own), V1 (fused, two strided
stores), V2 (fused, interleaved store) and V3 (fused, each byte loaded for each of its two
elements), in blocks of 512 bytes; and ghostway0's (fused, strided, tiles of 1024 bytes).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

STRIDED, INTERLEAVED, DUPLICATED = 0, 1, 2


@triton.jit
def _decode_absmax(
    absmax_ptr, code_ptr, nested_ptr, offset_ptr, out_ptr, blocks, block_size: tl.constexpr
):
    index = tl.program_id(0) * block_size + tl.arange(0, block_size)
    mask = index < blocks
    code = tl.load(code_ptr + tl.load(absmax_ptr + index, mask=mask).to(tl.int32), mask=mask)
    tl.store(
        out_ptr + index,
        code * tl.load(nested_ptr + index // 256, mask=mask) + tl.load(offset_ptr),
        mask=mask,
    )


@triton.jit
def _decode(
    packed_ptr,
    absmax_ptr,
    code_ptr,
    nested_ptr,
    offset_ptr,
    values_ptr,
    out_ptr,
    packed_bytes,
    block_size: tl.constexpr,
    fused: tl.constexpr,
    style: tl.constexpr,
):
    if style == 2:
        element = tl.program_id(0) * block_size * 2 + tl.arange(0, block_size * 2)
        byte = element // 2
    else:
        byte = tl.program_id(0) * block_size + tl.arange(0, block_size)
    mask = byte < packed_bytes
    codes = tl.load(packed_ptr + byte, mask=mask)
    block = byte // 32
    absmax = tl.load(absmax_ptr + block, mask=mask)
    if fused:
        nested = tl.load(nested_ptr + block // 256, mask=mask)
        absmax = tl.load(code_ptr + absmax.to(tl.int32), mask=mask) * nested + tl.load(offset_ptr)
    if style == 2:
        value = tl.load(values_ptr + ((codes >> (4 * (1 - element % 2)).to(tl.uint8)) & 15))
        tl.store(out_ptr + element, (value * absmax).to(out_ptr.dtype.element_ty), mask=mask)
    else:
        high = (tl.load(values_ptr + (codes >> 4)) * absmax).to(out_ptr.dtype.element_ty)
        low = (tl.load(values_ptr + (codes & 15)) * absmax).to(out_ptr.dtype.element_ty)
        if style == 1:
            element = tl.program_id(0) * block_size * 2 + tl.arange(0, block_size * 2)
            tl.store(out_ptr + element, tl.interleave(high, low), mask=element < packed_bytes * 2)
        else:
            tl.store(out_ptr + byte * 2, high, mask=mask)
            tl.store(out_ptr + byte * 2 + 1, low, mask=mask)


def recreated(
    name: str, packed: torch.Tensor, state: object, out: torch.Tensor
) -> Callable[[], None]:
    """One of "Weitkamp V0" … "Weitkamp V3" and "ghostway0", bound to its arguments."""
    styles = {
        "Weitkamp V0": (512, False, STRIDED),
        "Weitkamp V1": (512, True, STRIDED),
        "Weitkamp V2": (512, True, INTERLEAVED),
        "Weitkamp V3": (512, True, DUPLICATED),
        "ghostway0": (1024, True, STRIDED),
    }
    block, fused, style = styles[name]
    nested = state.state2
    scales = state.absmax if fused else torch.empty(state.absmax.numel(), device=out.device)
    blocks = state.absmax.numel()

    def run() -> None:
        if not fused:
            _decode_absmax[(triton.cdiv(blocks, 1024),)](
                state.absmax, nested.code, nested.absmax, state.offset, scales, blocks, 1024
            )
        _decode[(triton.cdiv(packed.numel(), block),)](
            packed,
            scales,
            nested.code,
            nested.absmax,
            state.offset,
            state.code,
            out,
            packed.numel(),
            block,
            fused,
            style,
        )

    return run


def unsloth(
    packed: torch.Tensor, state: object, out: torch.Tensor, configuration: tuple | None
) -> Callable[[], None] | None:
    """Unsloth's public function, with the configuration it ships for the card (None) or another of
    its own.
    """
    try:
        from unsloth.kernels import nf4
    except ImportError:
        return None
    nested = state.state2

    def run() -> None:
        nf4._CONFIG_OVERRIDE = configuration
        nf4.dequantize_nf4(
            packed,
            state.absmax,
            nested.code,
            nested.absmax,
            state.offset,
            state.code,
            64,
            256,
            out.shape,
            out.dtype,
            out,
        )

    return run
