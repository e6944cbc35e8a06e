"""Finds the experts of a checkpoint, checks that they are whole, and cuts stacks of them apart."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from nf4conv.choose.decisions import Keep, Pack, PackedMatrix
from nf4conv.errors import PlanError
from nf4conv.models.expert_layouts import (
    UNEVEN,
    FoundStack,
    are_stacked,
    experts_in,
    find_stack,
    layouts_of,
    partner_names,
)
from nf4conv.models.families import families_of, model_types
from nf4conv.options import QuantizeOptions
from nf4conv.sources.encodings.types.bitsandbytes import is_in_4_bits
from nf4conv.sources.tensors import TensorInfo

PACKED_BY_DEFAULT: Final = True
"""True if mixtures are packed unless the user says otherwise: transformers 5 loads them with
nf4conv installed.
"""

_LARGE_SHARE: Final = 0.5
"""Experts that take a larger share of a checkpoint's bytes are packed by default."""

_SINGLE: Final = re.compile(r"^(.*(?:^|\.)experts)\.(\d+)\.(.+)\.weight$")
"""Matches the name of a weight of a single expert: path of the experts, number, projection."""


class _Sizes(NamedTuple):
    """The sizes that all stacks of a layer share."""

    experts: int
    inner: int  # width between the projections
    outer: int  # width of the model


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
        match = _SINGLE.match(name)
        return None if match is None else match[1]

    def packs_by_default(self, options: QuantizeOptions) -> bool:
        """Returns True if experts are packed although the user does not ask for it.

        They are where they take most of the bytes, and where transformers 5 loads the result. A
        source in 4 bits keeps its layout, and a file for image tools has no loader for experts.
        """
        if not PACKED_BY_DEFAULT or options.single_file or "model_type" not in self.config:
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
        sizes = _sizes(tensor, found, is_transposed, self.config)
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
            if sizes != _sizes(
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


def _sizes(
    tensor: TensorInfo, found: FoundStack, is_transposed: bool, config: Mapping[str, Any]
) -> _Sizes:
    """Returns the sizes of a stack, if it were of this orientation."""
    experts, rows, columns = _shape_of(tensor, found, config)
    outputs, inputs = (columns, rows) if is_transposed else (rows, columns)
    if found.stack.is_last:
        return _Sizes(experts, inner=inputs, outer=outputs)
    return _Sizes(experts, inner=outputs // len(found.stack.projections), outer=inputs)


def _shape_of(
    tensor: TensorInfo, found: FoundStack, config: Mapping[str, Any]
) -> tuple[int, int, int]:
    """Returns [experts, rows, columns] of a stack, as each matrix is stored.

    Raises:
        PlanError: the stack does not divide into experts, or into as many as the config says.
    """
    numbers = experts_in(config)
    if not found.stack.is_flat:
        experts, rows, columns = tensor.shape
        if numbers and experts not in numbers:
            raise PlanError.about(
                tensor.file,
                tensor.name,
                f"a stack of {experts} experts, but config.json "
                f"says {' or '.join(map(str, sorted(numbers)))}",
            )
        return experts, rows, columns
    rows, columns = tensor.shape
    experts = min(numbers, default=0)
    if not experts or rows % experts:
        raise PlanError.about(
            tensor.file,
            tensor.name,
            f"{rows} rows do not divide into {experts} experts, which is the number in config.json",
        )
    return experts, rows // experts, columns


def cut_stack(
    tensor: TensorInfo, found: FoundStack, is_transposed: bool, config: Mapping[str, Any]
) -> tuple[PackedMatrix, ...]:
    """Returns the weights of single experts that a stack holds, expert by expert.

    Args:
        tensor: the stack.
        found: how experts are stacked in it.
        is_transposed: True if its matrices are [in, out].
        config: the content of config.json.

    Raises:
        PlanError: its rows, or columns, do not divide into those of its projections.
    """
    stack = found.stack
    experts, rows, columns = _shape_of(tensor, found, config)
    outputs, inputs = (columns, rows) if is_transposed else (rows, columns)
    parts = len(stack.projections)
    if outputs % parts:
        raise PlanError.about(
            tensor.file,
            tensor.name,
            f"{outputs} outputs of an expert do not divide into "
            f"those of {' and '.join(stack.projections)}",
        )
    size = outputs // parts
    matrices = []
    for expert in range(experts):
        for place, projection in enumerate(stack.projections):
            name = found.name_of(expert, projection)
            matrix = PackedMatrix(name, (size, inputs), is_transposed)
            if stack.is_flat:
                first_row = expert * rows
                matrix = matrix._replace(rows=(first_row, first_row + rows))
            else:
                taken = (place * size, (place + 1) * size)
                if stack.is_interleaved:
                    taken = (place, outputs)
                    matrix = matrix._replace(step=parts)
                matrix = _with_outputs(matrix._replace(expert=expert), taken)
            matrices.append(matrix)
    return tuple(matrices)


def _with_outputs(matrix: PackedMatrix, taken: tuple[int, int]) -> PackedMatrix:
    """Returns the weight that takes some outputs of an expert, which are rows or columns of it."""
    if matrix.transpose:
        return matrix._replace(columns=taken)
    return matrix._replace(rows=taken)


def check_layout(decisions: Mapping[str, Pack | Keep], experts: Experts, moe: str | None) -> None:
    """Checks the experts that are stored one by one and are to be packed.

    Args:
        decisions: what becomes of each tensor, by name.
        experts: those of the checkpoint.
        moe: how experts are to be stored; None for a source in 4 bits that keeps its layout.

    Raises:
        PlanError: an expert is missing, or has another shape than the others of its layer. Loaders
            put all experts of a layer into one tensor.
    """
    layers: dict[str, dict[str, dict[int, TensorInfo]]] = {}
    for name, decision in decisions.items():
        if not isinstance(decision, Pack) or experts.layer_of(name) is None:
            continue
        match = _SINGLE.match(name)
        if match is not None:
            if moe == "stacked":
                raise PlanError(
                    f"{name}: --moe stacked: no stacks are known for the experts of "
                    f"{experts.config.get('model_type', 'this checkpoint')}; --moe packed packs "
                    f"them one by one"
                )
            projections = layers.setdefault(match[1], {})
            projections.setdefault(match[3], {})[int(match[2])] = experts.tensors[name]
    is_uneven = any(model_type in UNEVEN for model_type in model_types(experts.config))
    if moe is None or is_uneven or "model_type" not in experts.config:
        return
    numbers = experts_in(experts.config)
    for layer, projections in layers.items():
        count = 1 + max(max(weights) for weights in projections.values())
        if numbers and count > max(numbers):
            raise PlanError(
                f"{layer}: {count} experts, but config.json says {max(numbers)}: the checkpoint "
                f"is of another model than its config.json"
            )
        if numbers and count not in numbers:
            count = min(number for number in numbers if number > count)  # the last are missing
        for projection, weights in projections.items():
            _check_projection(layer, projection, weights, count)


def _check_projection(
    layer: str, projection: str, weights: Mapping[int, TensorInfo], count: int
) -> None:
    first = next(iter(weights.values()))
    for expert in range(count):
        weight = weights.get(expert)
        if weight is None:
            raise PlanError(
                f"{first.file}: {layer}.{expert}.{projection}.weight is missing: "
                f"of {count} experts of this layer {len(weights)} have it",
                path=first.file,
            )
        if weight.shape != first.shape:
            raise PlanError(
                f"{weight.file}: {weight.name} is {list(weight.shape)}, but {first.name} of the "
                f"same layer is {list(first.shape)}: loaders put all experts of a layer into one "
                f"tensor",
                path=weight.file,
                tensor=weight.name,
            )


def is_of_experts(decision: Pack) -> bool:
    """Returns True if a tensor becomes weights of single experts, or a packed stack of them."""
    first = decision.matrices[0]
    return len(first.shape) == 3 or _SINGLE.match(first.name) is not None


def alike_in_layers(
    decisions: Mapping[str, Pack | Keep], experts: Experts
) -> dict[str, Pack | Keep]:
    """Keeps all experts of a layer where some of them have to be kept.

    transformers 5 and vLLM put the experts of a layer into one tensor, which is packed or not. What
    the source itself has in 4 bits beside experts in 16 bits stays as it is.
    """
    if "model_type" not in experts.config:
        return dict(decisions)
    packed: dict[str, list[str]] = {}
    kept: dict[str, list[str]] = {}
    for name, decision in decisions.items():
        layer = experts.layer_of(name)
        if layer is not None:
            group = packed.setdefault(layer, [])
            if isinstance(decision, Keep):
                group = kept.setdefault(layer, [])
            group.append(name)
    alike = dict(decisions)
    for layer, names in kept.items():
        others = packed.get(layer, [])
        if not others or _is_mixed_in_source(experts, names, others):
            continue
        first = decisions[names[0]]
        assert isinstance(first, Keep)
        for name in others:
            why = f"loaders need the experts of a layer alike, and one is kept: {first.reason}"
            alike[name] = Keep(why, is_linear=name not in experts.stacks)
    return alike


def _is_mixed_in_source(experts: Experts, kept: Sequence[str], packed: Sequence[str]) -> bool:
    """Returns True if the packed experts of a layer are in 4 bits already, and the kept are not."""
    kept_in_4_bits = any(is_in_4_bits(experts.tensors[name]) for name in kept)
    return not kept_in_4_bits and all(is_in_4_bits(experts.tensors[name]) for name in packed)


class Readers(NamedTuple):
    """Says who reads the experts of a checkpoint that has them in 4 bits.

    Attributes:
        text: how they are stored, and who reads them.
        has_loader: True if transformers 5 does, with nf4conv installed.
        in_transformers_4: True if transformers 4 does by itself, where it knows the model.
    """

    text: str
    has_loader: bool
    in_transformers_4: bool = False


def readers_of(
    matrices: Iterable[PackedMatrix], config: Mapping[str, Any], quant_type: str | None
) -> Readers | None:
    """Finds out who reads the experts of a checkpoint.

    Args:
        matrices: the weights in 4 bits; the first expert among them tells.
        config: the content of config.json.
        quant_type: the 4-bit data type, or None for the usual one.

    Returns:
        Who does; None if no expert is in 4 bits, or if the family's experts load everywhere.
    """
    if any(family.splits_experts for family in families_of(config)):
        return None
    for matrix in matrices:
        is_stack = len(matrix.shape) == 3
        if is_stack or _SINGLE.match(matrix.name) is not None:
            break
    else:
        return None
    if not is_stack and not all(layout.has_loader for layout in layouts_of(config)):
        text = "experts are packed, which no loader reads for this family; nf4conv dequantize does"
        return Readers(text, has_loader=False)
    if is_stack:
        text = (
            "experts are packed as the stacks that they are, which transformers 5 with nf4conv "
            "installed and Unsloth read"
        )
    elif are_stacked(config) or matrix.expert is not None:
        text = (
            "experts are packed one by one, which for this family transformers 5 with nf4conv "
            "installed reads"
        )
    else:
        others = "vLLM's bitsandbytes plugin and Unsloth"
        if quant_type == "fp4":
            others = "Unsloth"
        text = (
            f"experts are packed one by one, which transformers 5 with nf4conv installed reads; "
            f"where it knows the model, transformers 4.57 does too, and by their code {others}"
        )
        return Readers(text, has_loader=True, in_transformers_4=True)
    return Readers(text, has_loader=True)
