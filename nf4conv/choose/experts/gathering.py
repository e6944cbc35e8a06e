"""Finds the experts of a checkpoint: single ones, and stacks of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.choose.decisions import PackedMatrix
from nf4conv.choose.experts.stacks import cut_stack, sizes_of
from nf4conv.errors import PlanError
from nf4conv.models.experts import SINGLE_WEIGHT, FoundStack, find_stack, partner_names
from nf4conv.models.families import layouts_of
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.tensors import TensorInfo

PACKED_BY_DEFAULT: Final = True
"""True if mixtures are packed unless the user says otherwise: transformers 5 loads them with
nf4conv installed.
"""

_LARGE_SHARE: Final = 0.5
"""Experts that take a larger share of a checkpoint's bytes are packed by default."""


@dataclass(frozen=True)
class Experts:
    """Knows the experts of a checkpoint.

    Attributes:
        tensors: all tensors of the checkpoint, by name.
        config: the content of its config.json.
        stacks: how experts are stacked in a tensor, by its name.
    """

    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    stacks: Mapping[str, FoundStack]

    @classmethod
    def gather(cls, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> "Experts":
        """Looks at the names and shapes of all tensors of a checkpoint."""
        by_name = {tensor.name: tensor for tensor in tensors}
        return cls(by_name, config, stacks_of(tensors, config))

    def layer_of(self, name: str) -> str | None:
        """Returns the path of the experts that a tensor belongs to; None for any other tensor."""
        found = self.stacks.get(name)
        if found is not None:
            return found.experts
        if ".experts." not in name and not name.startswith("experts."):
            return None
        match = SINGLE_WEIGHT.match(name)
        return None if match is None else match[1]

    def packs_by_default(self) -> bool:
        """Returns True if experts are packed although the user does not ask for it.

        They are where they take most of the bytes, and where transformers 5 loads the result. A
        source in 4 bits keeps its layout.
        """
        if not PACKED_BY_DEFAULT or "model_type" not in self.config:
            return False
        if not all(found.layout.has_loader for found in self.stacks.values()):
            return False
        total = 0
        of_experts = 0
        for name, tensor in self.tensors.items():
            if tensor.encoding is not None and is_in_4_bits(tensor):
                return False
            total += tensor.nbytes
            if self.layer_of(name) is not None:
                of_experts += tensor.nbytes
        return of_experts > _LARGE_SHARE * total

    def matrices_of(self, tensor: TensorInfo) -> tuple[PackedMatrix, ...]:
        """Returns the weights of single experts that a stack holds.

        Raises:
            PlanError: the stack does not divide, or does not fit the others of its layer.
        """
        found = self.stacks[tensor.name]
        return cut_stack(tensor, found, self._is_transposed(tensor, found), self.config)

    def _is_transposed(self, tensor: TensorInfo, found: FoundStack) -> bool:
        """Returns True if the matrices of a stack are [in, out]; checks the stacks beside it."""
        usual = found.stack.is_transposed
        either = (usual, not usual) if found.layout.fits_either_way else (usual,)
        for is_transposed in either:
            misfit = self._misfit(tensor, found, is_transposed)
            if misfit is None:
                return is_transposed
        partner = self._misfit(tensor, found, usual)
        assert partner is not None
        raise PlanError.about(
            tensor.file,
            tensor.name,
            f"a stack of experts {list(tensor.shape)} does not fit "
            f"{partner.name} {list(partner.shape)} of the same layer; the checkpoint is damaged, "
            f"or of another model than its config.json says",
        )

    def _misfit(
        self, tensor: TensorInfo, found: FoundStack, is_transposed: bool
    ) -> TensorInfo | None:
        """Returns the stack of the same layer that a stack does not fit; None if it fits all."""
        sizes = sizes_of(tensor, found, is_transposed, self.config)
        # a family of either orientation has both stacks of a layer in the same
        is_flipped = is_transposed is not found.stack.is_transposed
        for name in partner_names(tensor.name, found):
            partner = self.tensors.get(name)
            if partner is None:
                raise PlanError.about(
                    tensor.file,
                    tensor.name,
                    f"the checkpoint lacks {name}, which holds the "
                    f"other projections of these experts",
                )
            other = self.stacks[name]
            if sizes != sizes_of(
                partner, other, other.stack.is_transposed is not is_flipped, self.config
            ):
                return partner
        return None


def stacks_of(tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> dict[str, FoundStack]:
    """Returns how experts are stacked in each tensor that stacks some, by its name."""
    layouts = layouts_of(config)
    may_be_flat = any(stack.is_flat for layout in layouts for stack in layout.stacks)
    stacks = {}
    for tensor in tensors:
        dimensions = len(tensor.shape)
        if not layouts or dimensions not in (2, 3) or (dimensions == 2 and not may_be_flat):
            continue
        found = find_stack(tensor.name, layouts)
        if found is not None and found.stack.is_flat == (dimensions == 2):
            stacks[tensor.name] = found
    return stacks
