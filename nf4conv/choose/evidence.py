"""Collects what names, shapes and the config tell about the tensors of a checkpoint.

Evidence answers whether a tensor is an embedding, a head, a router, part of a tower, … or a plain
`nn.Linear`.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nf4conv.models.config import levels
from nf4conv.models.families import families_of, is_transposed
from nf4conv.models.family_table import Family
from nf4conv.models.module_names import is_multimodal, module_of
from nf4conv.models.name_patterns import (
    EXPERT,
    FLOAT32,
    HEAD,
    LANGUAGE_LAYER,
    NUMBERED,
    PREDICTION_LAYER,
    ROUTER,
    is_embedding,
    is_in_tower,
)
from nf4conv.sources.foreign.bitsandbytes import is_in_4_bits
from nf4conv.sources.tensors import TensorInfo

# bitsandbytes' CPU kernels take multiples of 32 rows, and fewer are not worth the loss
FEWEST_ROWS: Final = 32


class Why:
    """Reasons for keeping a tensor that code asks for, as users read them."""

    FAMILY = "loaders do not take this weight of the family in 4 bits"
    ROUTER = "a router"
    EXPERT = "an expert, which transformers 5 loads in 16 bits only (--moe packed packs it)"
    STACKED_EXPERTS = "experts stacked in one tensor (--moe packed packs them)"
    OUTSIDE_BLOCKS = "outside the blocks of a diffusion model"
    TOWER = "in a vision or audio part"
    RENAMED_TOWER = "in a vision or audio part, which transformers 5 loads under other names"
    HEAD = "an output head"
    FEW_ROWS = f"fewer than {FEWEST_ROWS} rows"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Describes a checkpoint as a whole.

    Attributes:
        shapes: the shape of every tensor, by name.
        families: the listed deviations that apply.
        vocab_sizes: every vocabulary size that the config names.
        layers: the largest number of layers that the config names; 0 when it names none.
        multimodal: True if encoders of other inputs stand beside a language model.
        mostly_half: True if most bytes are not float32.
        names_in_blocks: the parts of the paths of all matrices in numbered blocks. It is empty
            unless a family has `only_blocks`.
        plain_experts: True if experts that are stored one by one have nothing but weights.
    """

    shapes: Mapping[str, tuple[int, ...]]
    families: tuple[Family, ...]
    vocab_sizes: frozenset[int]
    layers: int
    multimodal: bool
    mostly_half: bool
    names_in_blocks: frozenset[str] = frozenset()
    plain_experts: bool = False

    @classmethod
    def gather(cls, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> "Evidence":
        """Looks at all tensors of a checkpoint and at the content of its config.json."""
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        vocab_sizes = set()
        layers = 0
        for _, level in levels(config):
            for key, number in level.items():
                if isinstance(number, int) and key.endswith("vocab_size"):
                    vocab_sizes.add(number)
                elif isinstance(number, int) and key == "num_hidden_layers":
                    layers = max(layers, number)

        families = families_of(config)
        names_in_blocks = set()
        if any(family.only_blocks for family in families):
            names_in_blocks = _names_in_blocks(shapes)
        return cls(
            shapes=shapes,
            families=families,
            vocab_sizes=frozenset(vocab_sizes),
            layers=layers,
            multimodal=is_multimodal(config),
            mostly_half=_are_mostly_half(tensors),
            names_in_blocks=frozenset(names_in_blocks),
            plain_experts=all(name.endswith(".weight") for name in shapes if ".experts." in name),
        )

    def kind_of(self, tensor: TensorInfo) -> Hashable:
        """Returns a key that is the same for tensors which no rule tells apart.

        Experts that are stored one by one, with nothing beside them but weights, share a key. A
        decision about one is then a decision about all, which makes large checkpoints fast to plan.
        """
        stack, found, rest = tensor.name.partition(".experts.")
        number, _, rest = rest.partition(".")
        if not (found and self.plain_experts and number.isdecimal()):
            return tensor.name
        in_4_bits = tensor.encoding is not None and is_in_4_bits(tensor)
        return (stack, rest, tensor.shape, tensor.dtype, in_4_bits)

    def why_not_linear(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Returns why a tensor is certainly not the weight of an `nn.Linear`; None if it may be."""
        if len(shape) > 2:
            if re.search(r"(^|\.)experts\.", name):
                return Why.STACKED_EXPERTS
            return "a convolution or another tensor"
        if len(shape) < 2:
            return "a vector"
        if not name.endswith(".weight"):
            return "a bare parameter, not a module's weight"
        module = module_of(name)
        leaf = module.rpartition(".")[2]
        if not is_embedding(leaf):
            return None
        # a projection of patches has such a name, too, and an embedding has no bias
        if "patch" in leaf or f"{module}.bias" in self.shapes:
            return None
        if self._is_linear_by_family(module):
            return None
        return "an embedding"

    def why_kept(
        self, module: str, shape: tuple[int, ...], *, towers: bool, experts: bool
    ) -> str | None:
        """Returns why a matrix that may be an `nn.Linear` is not packed; None when it is packed."""
        if 0 in shape:
            return "empty"
        if any(family.keep and re.search(family.keep, module) for family in self.families):
            return Why.FAMILY
        if self._is_linear_by_family(module):
            return None
        if any(family.only_blocks for family in self.families) and not NUMBERED.search(module):
            # A proj_out at the top is packed if blocks have a proj_out, too: the skip list could
            # not name it without naming theirs. It may have few rows. Only bitsandbytes' kernels
            # for CPUs cannot take these, and diffusers needs a GPU.
            return None if module in self.names_in_blocks else Why.OUTSIDE_BLOCKS
        if self.is_in_tower(module):
            if any(family.renames_towers for family in self.families):
                return Why.RENAMED_TOWER
            if not towers:
                return Why.TOWER
        if is_transposed(module, self.families):
            return None
        return self._why_no_layer(module, shape) or self._why_special(module, shape, experts)

    def _why_no_layer(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Returns why a matrix is no layer between the model's input and its output."""
        if is_embedding(module.rpartition(".")[2]):
            return "an input embedding"
        may_be_head = HEAD.search(module) or shape[0] in self.vocab_sizes
        if may_be_head and not NUMBERED.search(module):
            return Why.HEAD
        layer = LANGUAGE_LAYER.match(module)
        is_beyond = layer is not None and 0 < self.layers <= int(layer[1])
        if is_beyond or PREDICTION_LAYER.search(module):
            return "a layer beyond the model's, for predicting several tokens"
        return None

    def _why_special(self, module: str, shape: tuple[int, ...], experts: bool) -> str | None:
        """Returns why a matrix inside a layer has to stay unpacked."""
        if ROUTER.search(module):
            return Why.ROUTER
        if not experts and EXPERT.search(module):
            return Why.EXPERT
        parent, _, leaf = module.rpartition(".")
        if leaf == "weights_proj":
            return Why.FAMILY  # the indexer of sparse attention reads it outside of its module
        if leaf in ("x_proj", "dt_proj", "out_proj") and f"{parent}.D" in self.shapes:
            return "state-space kernels read this weight directly"
        if leaf == "out_proj" and f"{parent}.in_proj_weight" in self.shapes:
            return "nn.MultiheadAttention reads this weight directly"
        if shape[0] < FEWEST_ROWS:
            return Why.FEW_ROWS
        return None

    def is_in_tower(self, module: str) -> bool:
        """Returns True for a module in a vision or audio part beside a language model."""
        return self.multimodal and is_in_tower(module)

    def why_unsure(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Returns why a matrix that looks like an `nn.Linear` may be none; None if it is sure."""
        bias = self.shapes.get(f"{module}.bias")
        if bias == (shape[0],):
            return None
        if self._is_linear_by_family(module) or is_transposed(module, self.families):
            return None
        if module in self.names_in_blocks:
            return None
        if bias is not None:
            return f"its bias has shape {list(bias)}"
        if not NUMBERED.search(module):
            return "outside the layers and without a bias"
        return None

    def is_float32_by_design(self, tensor: TensorInfo) -> bool:
        """Returns True if a kept tensor that is stored in float32 has to stay so.

        transformers casts what it loads to what the model asks for, except `*.weight` (from 5.21
        on); those of routers stay in float32 when the rest of the checkpoint is not.
        """
        if tensor.dtype != "F32":
            return False
        if FLOAT32.search(tensor.name):
            return True
        module = module_of(tensor.name)
        for family in self.families:
            if family.float32 and re.search(family.float32, module):
                return True
        if not self.mostly_half:
            return False
        is_parameter = not tensor.name.endswith((".weight", ".bias"))
        return is_parameter or ROUTER.search(module) is not None

    def _is_linear_by_family(self, module: str) -> bool:
        return any(family.linear and re.search(family.linear, module) for family in self.families)


def _are_mostly_half(tensors: Sequence[TensorInfo]) -> bool:
    """Returns True if most bytes are not float32."""
    float32 = sum(tensor.nbytes for tensor in tensors if tensor.dtype == "F32")
    total = 0
    for tensor in tensors:  # few of them tell, as a rule
        total += tensor.nbytes
        if total > 2 * float32:
            return True
    return False


def _names_in_blocks(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Returns every part of the path of each matrix that is below something numbered."""
    names: set[str] = set()
    for name, shape in shapes.items():
        if len(shape) != 2 or not name.endswith(".weight"):
            continue
        module = module_of(name)
        if NUMBERED.search(module):
            names.update(module.split("."))
    return names
