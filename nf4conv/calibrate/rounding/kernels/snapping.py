"""Finds the storable scale nearest to the one that is wanted, as StorableScales.snap does."""

import functools

import torch
import triton
import triton.language as tl

from nf4conv.calibrate.rounding.scales import StorableScales
from nf4conv.codec.kernels.arithmetic import SMALLEST_NORMAL
from nf4conv.codec.reference.nested import dynamic_cuts
from nf4conv.format.codebook import DYNAMIC_MAP


@functools.cache
def dynamic_table(device: torch.device) -> torch.Tensor:
    """Returns the 256 values of the dynamic map and the 255 cuts between, [512] float32."""
    values = torch.tensor(DYNAMIC_MAP, dtype=torch.float32, device=device)
    end = values.new_full((1,), float("inf"))
    return torch.cat([values, dynamic_cuts(device), end])


def snapping_tensors(storable: StorableScales, any_float: torch.Tensor):
    """Returns the offsets and the maxima of one group, [outputs] float32 each.

    Without double quantization `any_float` stands in their place, and kernels do not read it.
    """
    if storable.offset is None or storable.maxima is None:
        return any_float, any_float
    return storable.offset, storable.maxima


@triton.jit
def snap(wanted, offset, maximum, table_ptr, NESTED: tl.constexpr):
    """Returns the nearest storable scales, and their codes as int32.

    Args:
        wanted: float32, of any shape.
        offset: of the same shape.
        maximum: of the same shape, the nested absmax.
        table_ptr: [512] float32, of dynamic_table.
        NESTED: scales are quantized; else they stay as they are.
    """
    code = (wanted * 0.0).to(tl.int32)
    scale = wanted
    if NESTED:
        quotient = tl.div_rn(wanted - offset, tl.where(maximum > 0.0, maximum, 1.0))
        for level in tl.static_range(8):
            cut = tl.load(table_ptr + 256 + code + (127 >> level))
            code += tl.where(quotient > cut, 128 >> level, 0)
        product = tl.load(table_ptr + code) * maximum
        product = tl.where(tl.abs(product) < SMALLEST_NORMAL, 0.0, product)
        scale = product + offset
    return scale, code
