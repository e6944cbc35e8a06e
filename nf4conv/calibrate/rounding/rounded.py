"""A rounded weight: codes and scales as they are stored, and what its errors cost."""

from dataclasses import dataclass, replace
from typing import Final

import torch

from nf4conv.calibrate.rounding.levels import levels_of
from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import NestedState, QuantState, code_table

_CHUNK: Final = 1 << 26  # elements of a weight whose errors are in memory at a time


@dataclass(frozen=True)
class Rounded:
    """A weight in 4 bits, in the format of `quantize_4bit`.

    Attributes:
        packed: [ceil(n / 2), 1] uint8, two codes a byte.
        state: decodes them; `state.components()` are the tensors to store beside them.
    """

    packed: torch.Tensor
    state: QuantState

    def values(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Returns the weight as every loader decodes it; by default in its own dtype."""
        return dequantize_4bit(self.packed, self.state, dtype=dtype)


def search(
    weight: torch.Tensor, quant_type: str = "nf4", blocksize: int = 64, double_quant: bool = True
) -> Rounded:
    """Returns a weight with the codes and scales of the search that needs no data."""
    return Rounded(*quantize_4bit(weight, quant_type, blocksize, double_quant, scales="search"))


def layer_cost(weight: torch.Tensor, rounded: Rounded, moments: torch.Tensor) -> float:
    """Returns tr(E·H·Eᵀ): the mean over tokens of the squared error of a layer's outputs.

    H, [in, in] float32, are the mean second moments of the inputs. It is summed in float64.
    """
    errors = weight.float() - rounded.values(torch.float32)
    total = torch.zeros((), dtype=torch.float64, device=errors.device)
    rows = max(1, _CHUNK // errors.shape[1])
    for start in range(0, errors.shape[0], rows):
        part = errors[start : start + rows]
        total += (part @ moments).mul_(part).sum(dtype=torch.float64)
    return float(total)


def relative_error(weight: torch.Tensor, rounded: Rounded) -> float:
    """Returns ‖W - Ŵ‖ / ‖W‖, summed in float64; 0 for a weight of zeros."""
    errors = weight.float() - rounded.values(torch.float32)
    distance = float(torch.linalg.vector_norm(errors, dtype=torch.float64))
    length = float(torch.linalg.vector_norm(weight, dtype=torch.float64))
    return distance / length if length else 0.0


def pack(
    ranks: torch.Tensor,
    scales: torch.Tensor,
    searched: QuantState,
    nested_absmax: torch.Tensor | None,
) -> Rounded:
    """Packs ranks and scales as bitsandbytes stores them.

    Args:
        ranks: [out, in] uint8, of the levels of the data type.
        scales: [out, groups]: float32, or with double quantization their uint8 codes.
        searched: the state of the search: the shape and the options of the weight, and the nested
            offset, which stays.
        nested_absmax: [ceil(blocks / 256)] float32; None without double quantization.
    """
    codes = levels_of(searched.quant_type, ranks.device).codes
    by_element = codes.index_select(0, ranks.reshape(-1).int())
    pairs = by_element.view(-1, 2)
    packed = ((pairs[:, 0] << 4) | pairs[:, 1])[:, None].contiguous()
    state2 = None
    if nested_absmax is not None:
        state2 = NestedState(nested_absmax, code_table("dynamic", ranks.device))
    state = replace(searched, absmax=scales.reshape(-1).contiguous(), state2=state2)
    return Rounded(packed, state)
