"""PackedWeight holds one 3-D parameter of experts in 4 bits, as the parts that are on disk."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from nf4conv.inference.experts.packed import PackedExperts, decode
from nf4conv.inference.experts.product import decode_experts
from nf4conv.inference.experts.projection import suits_kernels, suits_together

AS_STORED = "as stored"
ALTERNATING = "alternating"
SEPARATED = "separated"
"""How the rows of a parameter come from those of its parts: in order; by turns of each part, as
gpt-oss has gate and up; or first all even rows, then all odd ones, where files have them by turns
and the model does not.
"""


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """The matrices of all experts, [E, rows, columns], in 4 bits.

    Attributes:
        parts: the projections that the parameter holds, such as gate and up; each has all experts.
        rows: AS_STORED, ALTERNATING or SEPARATED.
        is_transposed: True if the parameter has [columns, rows] of what the parts have.
    """

    parts: tuple[PackedExperts, ...]
    rows: str = AS_STORED
    is_transposed: bool = False

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.parts[0].experts

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix of one expert, as the parameter has it."""
        rows, columns = sum(part.rows for part in self.parts), self.parts[0].columns
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def device(self) -> torch.device:
        """The device that holds all tensors."""
        return self.parts[0].device

    def decode(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decodes experts, [n] integers on the device of the parts: [n, rows, columns] of the
        parameter, bit for bit as bitsandbytes decodes each part.
        """
        decoded = self._decode_stored(ids, dtype)
        if not self.is_transposed:
            return decoded
        decoded = decoded.transpose(1, 2)
        # products on a CPU add up in an order that depends on strides
        return decoded.contiguous() if decoded.device.type == "cpu" else decoded

    def _decode_stored(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decodes experts in the orientation of the parts."""
        if self._suits_kernels:
            return self._by_kernel(ids, dtype, by_ends=False)
        decoded = [decode(part, ids, dtype) for part in self.parts]
        if self.rows == ALTERNATING:
            return torch.stack(decoded, 2).flatten(1, 2)
        if self.rows == SEPARATED:
            return torch.cat([decoded[0][:, 0::2], decoded[0][:, 1::2]], 1)
        return decoded[0] if len(decoded) == 1 else torch.cat(decoded, 1)

    def decode_active(self, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Decodes the experts that have rows, without waiting for the device; `ends`, [E], says
        where the rows of each expert end.

        Returns [E, rows, columns] of the parameter, anything in the place of experts without rows;
        None if there is no kernel for it.
        """
        if not self._suits_kernels:
            return None
        decoded = self._by_kernel(ends.to(torch.int32), dtype, by_ends=True)
        return decoded.transpose(1, 2) if self.is_transposed else decoded

    @cached_property
    def _suits_kernels(self) -> bool:
        """Returns whether one launch can decode all parts."""
        first, last = self.parts[0], self.parts[-1]
        return (
            len(self.parts) <= 2
            and all(map(suits_kernels, self.parts))
            and (first is last or suits_together(first, last))
        )

    def _by_kernel(
        self, choice: torch.Tensor, dtype: torch.dtype, *, by_ends: bool
    ) -> torch.Tensor:
        """Decodes in one launch, in the orientation of the parts."""
        alternating = self.rows == ALTERNATING
        decoded = decode_experts(
            self.parts, choice, dtype, by_ends=by_ends, alternating=alternating
        )
        if self.rows == SEPARATED:
            return torch.cat([decoded[:, 0::2], decoded[:, 1::2]], 1)
        return decoded

    def to(self, device: torch.device | str) -> "PackedWeight":
        """Returns the same weight on another device."""
        return replace(self, parts=tuple(part.to(device) for part in self.parts))
