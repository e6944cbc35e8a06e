"""Finds experts, cuts stacks of them apart, checks that they are whole, and says who reads them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from nf4conv.choose.decisions import Keep, Pack, PackedMatrix
from nf4conv.errors import PlanError
from nf4conv.models.experts import SINGLE_WEIGHT, FoundStack, find_stack, partner_names
from nf4conv.models.families import (
    are_stacked,
    experts_in,
    families_of,
    has_uneven_experts,
    layouts_of,
)
from nf4conv.models.family_table import DOWN
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.tensors import TensorInfo

_LARGE_SHARE: Final = 0.5
"""Experts that take a larger share of a checkpoint's bytes are packed by default: transformers 5
loads them with nf4conv installed.
"""

Config: TypeAlias = Mapping[str, Any]
"""The content of config.json."""

Decisions: TypeAlias = Mapping[str, Pack | Keep]
"""Maps the name of each tensor to the decision about it."""


@dataclass(frozen=True)
class Experts:
    """Knows the experts of a checkpoint.

    Attributes:
        tensors: all tensors of the checkpoint, by name.
        config: the content of its config.json.
        stacks: how experts are stacked in a tensor, by its name.
        layers: the path of the experts that a tensor belongs to, by its name: of a stack, or of a
            weight of a single expert.
        singles: the weights of single experts, by the path of a layer's, projection and number.
    """

    tensors: Mapping[str, TensorInfo]
    config: Config
    stacks: Mapping[str, FoundStack]
    layers: Mapping[str, str]
    singles: Mapping[str, Mapping[str, Mapping[int, TensorInfo]]]

    @classmethod
    def gather(cls, tensors: Sequence[TensorInfo], config: Config) -> "Experts":
        """Looks at the names and shapes of all tensors of a checkpoint."""
        stacks = _stacks_of(tensors, config)
        layers = {}
        singles: dict[str, dict[str, dict[int, TensorInfo]]] = {}
        paths: dict[str, str] = {}  # each path once in memory
        for tensor in tensors:
            name = tensor.name
            if name in stacks:
                layers[name] = stacks[name].experts
            elif ".experts." in name or name.startswith("experts."):
                match = SINGLE_WEIGHT.match(name)
                if match is not None:
                    path, number, projection = match.groups()
                    layers[name] = path = paths.setdefault(path, path)
                    projections = singles.setdefault(path, {})
                    projections.setdefault(projection, {})[int(number)] = tensor
        return cls({tensor.name: tensor for tensor in tensors}, config, stacks, layers, singles)

    def check_layers(self) -> None:
        """Checks that all experts of each layer that are stored one by one are there, in one shape.

        Raises a PlanError otherwise.
        """
        if has_uneven_experts(self.config) or "model_type" not in self.config:
            return
        numbers = experts_in(self.config)
        for layer, projections in self.singles.items():
            count = 1 + max(max(weights) for weights in projections.values())
            if numbers and count > max(numbers):
                raise PlanError(
                    f"{layer}: {count} experts, but config.json says {max(numbers)}: the "
                    f"checkpoint is of another model than its config.json"
                )
            if numbers and count not in numbers:
                count = min(number for number in numbers if number > count)  # the last are missing
            for projection, weights in projections.items():
                _check_projection(layer, projection, weights, count)

    def packs_by_default(self) -> bool:
        """Returns True if experts are packed although the user does not ask for it.

        They are where they take most of the bytes, and where transformers 5 loads the result. A
        source in 4 bits keeps its layout.
        """
        if "model_type" not in self.config:
            return False
        total = 0
        of_experts = 0
        for name, tensor in self.tensors.items():
            if tensor.encoding is not None and is_in_4_bits(tensor):
                return False
            total += tensor.nbytes
            if name in self.layers:
                of_experts += tensor.nbytes
        return of_experts > _LARGE_SHARE * total

    def matrices_of(self, tensor: TensorInfo) -> tuple[PackedMatrix, ...]:
        """Returns the weights of single experts that a stack holds."""
        numbers = experts_in(self.config)
        if numbers and tensor.shape[0] not in numbers:
            raise PlanError.about(
                tensor.file,
                tensor.name,
                f"a stack of {tensor.shape[0]} experts, but config.json "
                f"says {' or '.join(map(str, sorted(numbers)))}",
            )
        found = self.stacks[tensor.name]
        return _cut_stack(tensor, found, self._is_transposed(tensor, found))

    def _is_transposed(self, tensor: TensorInfo, found: FoundStack) -> bool:
        """Returns True if the matrices of a stack are [in, out]; checks the stacks beside it."""
        partners = []
        for name in partner_names(tensor.name, found):
            if name not in self.tensors:
                raise PlanError.about(
                    tensor.file,
                    tensor.name,
                    f"the checkpoint lacks {name}, which holds the "
                    f"other projections of these experts",
                )
            partners.append(self.tensors[name])
        misfits: list[TensorInfo] = []
        # a family of either orientation has all stacks of a layer in the same
        for is_flipped in (False, True):
            sizes = _sizes_of(tensor, found, is_flipped)
            unlike = []
            for partner in partners:
                other = self.stacks.get(partner.name)  # None if it has other dimensions
                if other is None or sizes != _sizes_of(partner, other, is_flipped):
                    unlike.append(partner)
            if not unlike:
                return found.stack.is_transposed is not is_flipped
            misfits += unlike
            if not found.layout.fits_either_way:
                break
        raise PlanError.about(
            tensor.file,
            tensor.name,
            f"a stack of experts {list(tensor.shape)} does not fit "
            f"{misfits[0].name} {list(misfits[0].shape)} of the same layer; the checkpoint is "
            f"damaged, or of another model than its config.json says",
        )


def _stacks_of(tensors: Sequence[TensorInfo], config: Config) -> dict[str, FoundStack]:
    """Returns how experts are stacked in each tensor that stacks some, by its name."""
    layouts = layouts_of(config)
    if not layouts:
        return {}
    stacks = {}
    for tensor in tensors:
        found = find_stack(tensor.name, layouts) if len(tensor.shape) == 3 else None
        if found is not None:
            stacks[tensor.name] = found
    return stacks


# --- stacks ---------------------------------------------------------------------------------------


def _sizes_of(tensor: TensorInfo, found: FoundStack, is_flipped: bool) -> tuple[int, int, int]:
    """Returns the sizes that all stacks of a layer share: the experts, the width between the
    projections, and that of the model. `is_flipped` means the orientation that is not the usual.
    """
    experts, outputs, inputs = tensor.shape
    if found.stack.is_transposed is not is_flipped:
        outputs, inputs = inputs, outputs
    if found.stack.projections == DOWN:
        return experts, inputs, outputs
    return experts, outputs // len(found.stack.projections), inputs


def _cut_stack(
    tensor: TensorInfo, found: FoundStack, is_transposed: bool
) -> tuple[PackedMatrix, ...]:
    """Returns the weights of single experts that a stack holds, expert by expert."""
    stack = found.stack
    experts, rows, columns = tensor.shape
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
            matrix = PackedMatrix(name, (size, inputs), is_transposed, expert)
            taken = (place * size, (place + 1) * size)
            if stack.is_interleaved:
                taken = (place, outputs)
                matrix = matrix._replace(step=parts)
            if is_transposed:
                matrices.append(matrix._replace(columns=taken))
            else:
                matrices.append(matrix._replace(rows=taken))
    return tuple(matrices)


# --- layers ---------------------------------------------------------------------------------------


def _check_projection(
    layer: str, projection: str, weights: Mapping[int, TensorInfo], count: int
) -> None:
    """Raises a PlanError unless `count` experts have this projection, all in one shape."""
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


def alike_in_layers(decisions: Decisions, experts: Experts) -> dict[str, Pack | Keep]:
    """Keeps all experts of a layer where some of them have to be kept.

    transformers 5 and vLLM put the experts of a layer into one tensor, which is packed or not. What
    the source itself has in 4 bits beside experts in 16 bits stays as it is.
    """
    alike = dict(decisions)
    if "model_type" not in experts.config:
        return alike
    kept: dict[str, list[str]] = {}
    packed: dict[str, list[str]] = {}
    for name, layer in experts.layers.items():
        group = kept if isinstance(decisions[name], Keep) else packed
        group.setdefault(layer, []).append(name)
    for layer, names in kept.items():
        others = packed.get(layer, [])
        in_4_bits = [is_in_4_bits(experts.tensors[name]) for name in others]
        if all(in_4_bits) and not any(is_in_4_bits(experts.tensors[name]) for name in names):
            continue  # so it is in the source
        reason = decisions[names[0]].reason
        why = f"loaders need the experts of a layer alike, and one is kept: {reason}"
        for name in others:
            alike[name] = Keep(why, is_linear=name not in experts.stacks)
    return alike


# --- who reads them -------------------------------------------------------------------------------


class Readers(NamedTuple):
    """Says who reads the experts of a checkpoint that has them in 4 bits.

    Attributes:
        text: how they are stored, and who reads them; transformers 5 with nf4conv installed does.
        in_transformers_4: True if transformers 4 does by itself, where it knows the model.
    """

    text: str
    in_transformers_4: bool = False


def readers_of(
    matrices: Iterable[PackedMatrix], config: Mapping[str, Any], quant_type: str | None
) -> Readers | None:
    """Finds out who reads the experts of a checkpoint.

    The first expert tells. None if no expert is in 4 bits, or if the family's load everywhere.
    """
    if any(family.splits_experts for family in families_of(config)):
        return None
    for matrix in matrices:
        is_stack = len(matrix.shape) == 3
        if is_stack or SINGLE_WEIGHT.match(matrix.name) is not None:
            break
    else:
        return None
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
        return Readers(text, in_transformers_4=True)
    return Readers(text)
