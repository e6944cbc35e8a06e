"""Holds what has been chosen for weights so far: ranks and scales."""

from dataclasses import dataclass

import torch

from nf4conv.calibrate.rounding.levels import Levels


@dataclass
class Draft:
    """Holds what has been chosen so far, with inputs and groups in the order of the factor.

    Attributes:
        ranks: [in_features, outputs] uint8, of the levels.
        scales: [groups, outputs] float32, as they decode.
        scale_codes: [groups, outputs] uint8, with double quantization.
    """

    ranks: torch.Tensor
    scales: torch.Tensor
    scale_codes: torch.Tensor

    def of(self, outputs: slice) -> "Draft":
        """Returns a view of some outputs."""
        return Draft(
            self.ranks[..., outputs], self.scales[..., outputs], self.scale_codes[..., outputs]
        )

    def at(self, group: int) -> "Draft":
        """Returns a view of one group: scales have one dimension then."""
        blocksize = self.ranks.shape[0] // self.scales.shape[0]
        inputs = slice(group * blocksize, (group + 1) * blocksize)
        return Draft(self.ranks[inputs], self.scales[group], self.scale_codes[group])

    def copy(self) -> "Draft":
        """Returns a copy."""
        return Draft(self.ranks.clone(), self.scales.clone(), self.scale_codes.clone())

    def put(self, other: "Draft") -> None:
        """Takes over what another draft of the same shape has chosen."""
        self.ranks.copy_(other.ranks)
        self.scales.copy_(other.scales)
        self.scale_codes.copy_(other.scale_codes)

    def ordered(self, outputs: torch.Tensor) -> "Draft":
        """Returns a draft with outputs in another order, given by their numbers."""
        return Draft(
            self.ranks.index_select(1, outputs),
            self.scales.index_select(1, outputs),
            self.scale_codes.index_select(1, outputs),
        )

    def values(self, levels: Levels) -> torch.Tensor:
        """Returns the decoded weights, [in_features, outputs] float32."""
        values = levels.decode(self.ranks)
        grouped = values.view(self.scales.shape[0], -1, values.shape[1])
        grouped.mul_(self.scales[:, None, :])
        return values


def empty_draft(target: torch.Tensor, blocksize: int) -> Draft:
    """Returns a draft of nothing yet, for a target of [in_features, outputs]."""
    groups = (target.shape[0] // blocksize, target.shape[1])
    return Draft(
        ranks=torch.empty(target.shape, dtype=torch.uint8, device=target.device),
        scales=target.new_empty(groups),
        scale_codes=torch.empty(groups, dtype=torch.uint8, device=target.device),
    )
