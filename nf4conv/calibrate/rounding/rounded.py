"""A rounded weight: codes and scales as they are stored, and what they cost."""

from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.calibrate.rounding.levels import levels_of
from nf4conv.calibrate.rounding.moments import full_precision
from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import NestedState, QuantState, code_table

_CHUNK: Final = 1 << 26  # elements of a weight whose errors are in memory at a time


@dataclass(frozen=True)
class Rounded:
    """A weight in 4 bits, in the format of `quantize_4bit`.

    Attributes:
        packed: [ceil(n / 2), 1] uint8, two codes a byte.
        state: decodes them; `state.components()` are the tensors to store beside them.
        cost_searched: tr(E·H·Eᵀ) of the searched scales, H being the moments of the rounding.
        cost: tr(E·H·Eᵀ) of this weight. Both are NaN where nothing was measured.
        is_calibrated: False if the codes and scales are those of the search.
    """

    packed: torch.Tensor
    state: QuantState
    cost_searched: float = float("nan")
    cost: float = float("nan")
    is_calibrated: bool = False

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the weight as every loader decodes it; by default in its own dtype."""
        return dequantize_4bit(self.packed, self.state, dtype=dtype)


def search(
    weight: torch.Tensor,
    quant_type: str = "nf4",
    blocksize: int = 64,
    double_quant: bool = True,
) -> Rounded:
    """Returns a weight with the codes and scales of the search that needs no data.

    Args:
        weight: [out_features, in_features] float32, float16 or bfloat16.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one scale.
        double_quant: quantize the scales too.
    """
    packed, state = quantize_4bit(weight, quant_type, blocksize, double_quant, scales="search")
    return Rounded(packed, state)


def layer_cost(weight: torch.Tensor, rounded: Rounded, moments: torch.Tensor) -> float:
    """Returns tr(E·H·Eᵀ): the mean over tokens of the squared error of a layer's outputs.

    Args:
        weight: [out_features, in_features], the original.
        rounded: of this weight.
        moments: [in_features, in_features] float32, mean second moments H of the inputs, such as
            those of held-out text.
    """
    errors = weight.float() - rounded.values(torch.float32)
    return error_cost(errors, moments)


def error_cost(errors: torch.Tensor, moments: torch.Tensor) -> float:
    """Returns tr(E·H·Eᵀ) for errors E, [rows, inputs] float32, summed in float64."""
    total = torch.zeros((), dtype=torch.float64, device=errors.device)
    rows = max(1, _CHUNK // errors.shape[1])
    with full_precision():
        for start in range(0, errors.shape[0], rows):
            part = errors[start : start + rows]
            total += (part @ moments).mul_(part).sum(dtype=torch.float64)
    return float(total)


def pack(
    ranks: torch.Tensor,
    scales: torch.Tensor,
    searched: QuantState,
    nested_absmax: torch.Tensor | None,
) -> tuple[torch.Tensor, QuantState]:
    """Packs ranks and scales as bitsandbytes stores them.

    Args:
        ranks: [out_features, in_features] uint8, of the levels of the data type.
        scales: [out_features, groups]: float32, or with double quantization their uint8 codes.
        searched: the state of the search: the shape and the options of the weight, and the nested
            offset, which stays.
        nested_absmax: [ceil(blocks / 256)] float32; None without double quantization.

    Returns:
        packed: [n / 2, 1] uint8.
        state: the state that decodes them.
    """
    codes = levels_of(searched.quant_type, ranks.device).codes
    by_element = codes.index_select(0, ranks.reshape(-1).int())
    pairs = by_element.view(-1, 2)
    packed = ((pairs[:, 0] << 4) | pairs[:, 1])[:, None].contiguous()
    state2 = None
    if nested_absmax is not None:
        state2 = NestedState(nested_absmax, code_table("dynamic", ranks.device))
    state = QuantState(
        absmax=scales.reshape(-1).contiguous(),
        shape=searched.shape,
        dtype=searched.dtype,
        blocksize=searched.blocksize,
        quant_type=searched.quant_type,
        code=searched.code,
        offset=searched.offset,
        state2=state2,
    )
    return packed, state
