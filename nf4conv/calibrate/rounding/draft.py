"""Holds what has been chosen for weights so far, and from which scales it is chosen.

A scale that can be stored is any float32, or with double quantization one of 256. The state of the
nested quantization (its offset, and a maximum for each 256 blocks) is fixed before rounding begins.
Then a scale is stored as the code of offset + maximum · map[code]. The maxima are those of the
searched scales with some room, because rounding now and then wants a larger scale.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from nf4conv.calibrate.rounding.factor import Factor
from nf4conv.calibrate.rounding.levels import Levels, levels_of
from nf4conv.codec.quant_state import QuantState, code_table
from nf4conv.codec.reference.dequantize import flushed
from nf4conv.codec.reference.quantize import dynamic_cuts
from nf4conv.format.codebook import NESTED_BLOCKSIZE

ROOM: Final = 1.15
"""Factor of the nested maxima: how much larger a scale may become than the largest searched one."""


@dataclass
class Draft:
    """Holds ranks and scales of weights, with inputs and groups in the order of a factor.

    The rows of all weights, one behind the other, are its outputs.

    Attributes:
        levels: of the data type.
        ranks: [in_features, outputs] uint8, of the levels.
        scales: [groups, outputs] float32, as they decode.
        scale_codes: [groups, outputs] uint8, with double quantization.
        offset: [outputs] float32, the nested offset of the weight that each output belongs to; None
            without double quantization.
        maxima: [groups, outputs] float32, the nested absmax of each block; None without double
            quantization.
    """

    levels: Levels
    ranks: torch.Tensor
    scales: torch.Tensor
    scale_codes: torch.Tensor
    offset: torch.Tensor | None = None
    maxima: torch.Tensor | None = None

    @classmethod
    def beside(cls, searched: Sequence[QuantState], factor: Factor) -> "Draft":
        """Returns a draft of nothing yet, for weights of [out, in] with blocks inside rows.

        `searched` are their states with searched scales, all with double quantization, or none.
        """
        outputs = sum(state.shape[0] for state in searched)
        inputs = searched[0].shape[1]
        device = factor.order.device
        scales = torch.empty((len(factor.groups), outputs), device=device)
        draft = cls(
            levels=levels_of(searched[0].quant_type, device),
            ranks=torch.empty((inputs, outputs), dtype=torch.uint8, device=device),
            scales=scales,
            scale_codes=torch.empty_like(scales, dtype=torch.uint8),
        )
        offsets = []
        maxima = []
        for state in searched:
            nested = state.state2
            if nested is None or state.offset is None:
                return draft
            rows = state.shape[0]
            maximum = nested.absmax * ROOM
            by_block = maximum.repeat_interleave(NESTED_BLOCKSIZE)
            by_row = by_block[: state.absmax.numel()].view(rows, -1)
            maxima.append(by_row.T.index_select(0, factor.groups))
            offsets.append(state.offset.expand(rows))
        draft.offset = torch.cat(offsets)
        draft.maxima = torch.cat(maxima, dim=1)
        return draft

    def of(self, outputs: slice | torch.Tensor) -> "Draft":
        """Returns a view of some outputs; a copy if they are given by their numbers."""
        if isinstance(outputs, slice):
            return self._changed(lambda tensor: tensor[..., outputs])
        return self._changed(lambda tensor: tensor.index_select(-1, outputs))

    def at(self, group: int) -> "Draft":
        """Returns a view of one group: scales and maxima have one dimension then."""
        blocksize = len(self.ranks) // len(self.scales)
        first = group * blocksize
        maxima = self.maxima
        if maxima is not None:
            maxima = maxima[group]
        return replace(
            self,
            ranks=self.ranks[first : first + blocksize],
            scales=self.scales[group],
            scale_codes=self.scale_codes[group],
            maxima=maxima,
        )

    def copy(self) -> "Draft":
        """Returns a copy."""
        return self._changed(torch.clone)

    def put(self, other: "Draft") -> None:
        """Takes over what another draft of the same shape has chosen."""
        self.ranks.copy_(other.ranks)
        self.scales.copy_(other.scales)
        self.scale_codes.copy_(other.scale_codes)

    def values(self) -> torch.Tensor:
        """Returns the decoded weights, [in_features, outputs] float32."""
        values = self.levels.decode(self.ranks)
        groups, outputs = self.scales.shape
        grouped = values.view(groups, -1, outputs)
        grouped.mul_(self.scales[:, None, :])
        return values

    def snap(self, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the storable scales of a draft of one group that are nearest to wanted ones.

        Args:
            wanted: [..., outputs] float32.

        Returns:
            scales: [..., outputs] float32, as they decode.
            codes: [..., outputs] uint8; zeros without double quantization.
        """
        if self.offset is None or self.maxima is None:
            return wanted, torch.zeros_like(wanted, dtype=torch.uint8)
        device = wanted.device
        divisors = self.maxima.where(self.maxima > 0, 1)
        quotients = (wanted - self.offset) / divisors
        codes = torch.bucketize(quotients, dynamic_cuts(device))
        values = code_table("dynamic", device)[codes]
        scales = flushed(values * self.maxima) + self.offset
        return scales, codes.to(torch.uint8)

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Draft":
        """Returns a draft of all tensors, each of them changed."""
        return Draft(
            levels=self.levels,
            ranks=change(self.ranks),
            scales=change(self.scales),
            scale_codes=change(self.scale_codes),
            offset=None if self.offset is None else change(self.offset),
            maxima=None if self.maxima is None else change(self.maxima),
        )
