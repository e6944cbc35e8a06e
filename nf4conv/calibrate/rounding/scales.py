"""The scales that can be stored: any float32, or with double quantization 256 for each block.

The state of the nested quantization (its offset, and a maximum for each 256 blocks) is fixed before
rounding begins. Then a scale is stored as the code of offset + maximum · map[code]. The maxima are
those of the searched scales with some room, because rounding now and then wants a larger scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from nf4conv.codec.quant_state import QuantState, code_table
from nf4conv.codec.reference.blocks import flushed
from nf4conv.codec.reference.quantize import dynamic_cuts
from nf4conv.format.codebook import NESTED_BLOCKSIZE

ROOM: Final = 1.15
"""Factor of the nested maxima: how much larger a scale may become than the largest searched one."""


@dataclass(frozen=True)
class StorableScales:
    """The storable scales of weights whose rows are stacked: out_features rows in all.

    Attributes:
        offset: [out_features] float32, the nested offset of the weight that each row belongs to;
            None without double quantization.
        maxima: [groups, out_features] float32, the nested absmax of each block of the weights;
            None without double quantization.
    """

    offset: torch.Tensor | None
    maxima: torch.Tensor | None

    @classmethod
    def beside(cls, states: Sequence[QuantState]) -> "StorableScales":
        """Returns the storable scales for the states that a search gave, with room.

        Args:
            states: one for each weight, [out, in] with blocks inside rows. All have double
                quantization, or none.
        """
        offsets = []
        maxima = []
        for state in states:
            if state.state2 is None or state.offset is None:
                return cls(None, None)
            rows = state.shape[0]
            blocks = state.absmax.numel()
            by_block = (state.state2.absmax * ROOM).repeat_interleave(NESTED_BLOCKSIZE)[:blocks]
            maxima.append(by_block.view(rows, -1).T)
            offsets.append(state.offset.expand(rows))
        return cls(torch.cat(offsets), torch.cat(maxima, dim=1).contiguous())

    def in_order(self, groups: torch.Tensor) -> "StorableScales":
        """Returns these scales with groups in another order, given by their numbers."""
        if self.maxima is None:
            return self
        return StorableScales(self.offset, self.maxima.index_select(0, groups))

    def of(self, outputs: slice | torch.Tensor) -> "StorableScales":
        """Returns the scales of some outputs."""
        if self.offset is None or self.maxima is None:
            return self
        return StorableScales(self.offset[outputs], self.maxima[..., outputs])

    def at(self, group: int) -> "StorableScales":
        """Returns the scales of one group: `maxima` has one dimension then."""
        if self.maxima is None:
            return self
        return StorableScales(self.offset, self.maxima[group])

    def snap(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the storable scales of one group that are nearest to those that are wanted.

        Args:
            wanted: [..., out_features] float32.

        Returns:
            scales: [..., out_features] float32, as they decode.
            codes: [..., out_features] uint8; zeros without double quantization.
        """
        if self.offset is None or self.maxima is None:
            return wanted, torch.zeros_like(wanted, dtype=torch.uint8)
        quotients = (wanted - self.offset) / self.maxima.where(self.maxima > 0, 1)
        codes = torch.bucketize(quotients, dynamic_cuts(wanted.device)).to(torch.uint8)
        values = code_table("dynamic", wanted.device)[codes.long()]
        return flushed(values * self.maxima) + self.offset, codes


def with_room(state: QuantState) -> torch.Tensor | None:
    """Returns the nested absmax that goes with StorableScales; None without double quantization."""
    if state.state2 is None:
        return None
    return state.state2.absmax * ROOM
