"""A rounded weight: codes and scales as they are stored, and what its errors cost."""

from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import QuantState

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

    def errors(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns by how much the original weight is larger, float32."""
        return weight.float() - self.values(torch.float32)


def search(
    weight: torch.Tensor, quant_type: str = "nf4", blocksize: int = 64, double_quant: bool = True
) -> Rounded:
    """Returns a weight with the codes and scales of the search that needs no data."""
    return Rounded(*quantize_4bit(weight, quant_type, blocksize, double_quant, scales="search"))


def layer_cost(weight: torch.Tensor, rounded: Rounded, moments: torch.Tensor) -> float:
    """Returns tr(E·H·Eᵀ): the mean over tokens of the squared error of a layer's outputs.

    H, [in, in] float32, are the mean second moments of the inputs. It is summed in float64.
    """
    errors = rounded.errors(weight)
    total = torch.zeros((), dtype=torch.float64, device=errors.device)
    rows = max(1, _CHUNK // errors.shape[1])
    for part in torch.split(errors, rows):
        products = part @ moments
        products *= part
        total += products.sum(dtype=torch.float64)
    return float(total)
