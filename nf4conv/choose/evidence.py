"""What names, shapes and the config tell of a tensor: embedding, head, router, tower, … or a plain
`nn.Linear`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from nf4conv.models.config import levels
from nf4conv.models.families import READ, Family, families_of, is_transposed
from nf4conv.models.module_names import is_embedding, is_multimodal, module_of
from nf4conv.sources.tensors import TensorInfo, is_in_4_bits

FEWEST_ROWS: Final = (
    32  # bitsandbytes' CPU kernels take multiples of 32 rows, and fewer are not worth the loss
)


class Why(Enum):
    """The reasons for keeping a tensor that code asks for; the value is what the user reads."""

    ROUTER = "a router"
    EXPERT = "an expert, which transformers 5 loads in 16 bits only (--moe per-expert packs it)"
    STACKED_EXPERTS = "experts stacked in one tensor, which loaders take in 16 bits only"
    OUTSIDE_BLOCKS = "outside the blocks of a diffusion model"
    TOWER = "in a vision or audio part (--quantize-towers packs it)"
    RENAMED_TOWER = "in a vision or audio part, which transformers 5 loads under other names"
    HEAD = "an output head"
    FEW_ROWS = f"fewer than {FEWEST_ROWS} rows"
    UNSURE = "unsure"
    """With a detail."""


_TABLES: Final = json.loads(Path(__file__).with_suffix(".json").read_bytes())
_NAMES: Final[Mapping[str, str]] = {
    kind: "|".join(patterns) for kind, patterns in _TABLES["names"].items()
}
"""Regular expressions for what parts of a path are called, of towers for what their names begin
with.
"""

_HEAD: Final = re.compile(rf"(^|\.)({_NAMES['head']})(\.|$)")
_ROUTER: Final = re.compile(rf"(^|\.)({_NAMES['router']})$")
_TOWER: Final = re.compile(rf"^({_NAMES['tower']})")
_ABOVE: Final = {what: re.compile(pattern) for what, pattern in _TABLES["above"].items()}
_FLOAT32: Final = re.compile(_NAMES["float32"])


@dataclass(frozen=True, slots=True)
class Evidence:
    """A checkpoint seen as a whole."""

    shapes: Mapping[str, tuple[int, ...]]  # of every tensor, by name
    families: tuple[Family, ...]  # listed deviations that apply
    vocab_sizes: frozenset[int]  # every vocabulary size that the config names
    layers: int  # the largest number of layers that the config names; 0 when it names none
    multimodal: bool  # whether encoders of other inputs stand beside a language model
    mostly_half: bool  # whether most bytes are not float32
    # every part of the path of a matrix below something numbered; only where families ask
    names_in_blocks: frozenset[str] = frozenset()
    plain_experts: bool = False  # whether single experts have nothing but weights

    @classmethod
    def gather(cls, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> "Evidence":
        numbers = list(numbers_of(config))
        float32 = sum(tensor.nbytes for tensor in tensors if tensor.dtype == "F32")
        families = families_of(config)
        only_blocks = any(family.only_blocks for family in families)
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        modules = (
            module_of(name)
            for name, shape in shapes.items()
            if len(shape) == 2 and name.endswith(".weight")
        )
        blocks = (module for module in (modules if only_blocks else ()) if _in_layer(module))
        return cls(
            shapes=shapes,
            families=families,
            vocab_sizes=frozenset(number for key, number in numbers if key.endswith("vocab_size")),
            layers=max(
                (number for key, number in numbers if key == "num_hidden_layers"), default=0
            ),
            multimodal=is_multimodal(config),
            mostly_half=2 * float32 < sum(tensor.nbytes for tensor in tensors),
            names_in_blocks=frozenset(part for module in blocks for part in module.split(".")),
            plain_experts=not any(
                ".experts." in name and not name.endswith(".weight") for name in shapes
            ),
        )

    def kind_of(self, tensor: TensorInfo) -> tuple[object, ...]:
        """What tensors share that no rule tells apart: single experts with nothing beside them that
        is no weight.
        """
        stack, found, rest = tensor.name.partition(".experts.")
        number, _, rest = rest.partition(".")
        if not (found and self.plain_experts and number.isdecimal()):
            return (tensor.name,)
        return (
            stack,
            rest,
            tensor.shape,
            tensor.dtype,
            tensor.encoding is not None and is_in_4_bits(tensor),
        )

    def why_not_linear(self, name: str, shape: tuple[int, ...]) -> Why | str | None:
        """Why a tensor is certainly not the weight of an `nn.Linear`; None when it may be one."""
        if len(shape) > 2:
            return (
                Why.STACKED_EXPERTS
                if re.search(r"(^|\.)experts\.", name)
                else "a convolution or another tensor"
            )
        if len(shape) < 2:
            return "a vector"
        if not name.endswith(".weight"):
            return "a bare parameter, not a module's weight"
        module = module_of(name)
        leaf = module.rpartition(".")[2]
        if not is_embedding(leaf) or "patch" in leaf or f"{module}.bias" in self.shapes:
            return None
        return None if self._is_linear_by_family(module) else "an embedding"

    def why_kept(
        self, module: str, shape: tuple[int, ...], *, towers: bool, experts: bool
    ) -> Why | str | None:
        """Why a matrix that may be an `nn.Linear`, by its path on disk, is not packed; None when it
        is.

        `towers` says whether vision and audio parts are packed, `experts` whether experts stored
        one by one are.
        """
        if 0 in shape:
            return "empty"
        for family in self.families:
            for pattern, reason in family.keep:
                if re.search(pattern, module):
                    return reason
        if self._is_linear_by_family(module):
            return None
        if any(family.only_blocks for family in self.families) and not _in_layer(module):
            # a top-level proj_out cannot be listed without hitting every proj_out of the blocks; it
            # may have few rows, which only bitsandbytes' kernels for CPUs cannot take, and
            # diffusers wants a GPU
            return None if module in self.names_in_blocks else Why.OUTSIDE_BLOCKS
        renames_towers = any(family.renames_towers for family in self.families)
        if self.multimodal and (renames_towers or not towers) and _in_tower(module):
            return Why.RENAMED_TOWER if renames_towers else Why.TOWER
        if is_transposed(module, self.families):
            return None
        return self._why_no_layer(module, shape) or self._why_special(module, shape, experts)

    def _why_no_layer(self, module: str, shape: tuple[int, ...]) -> Why | str | None:
        parent, _, leaf = module.rpartition(".")
        if is_embedding(leaf):
            return "an input embedding"
        if not _above("a number", parent) and (
            _HEAD.search(module) or shape[0] in self.vocab_sizes
        ):
            return Why.HEAD
        layer = _above("a layer of the language model", parent)
        if _above("a layer that predicts more tokens", parent) or (
            layer and 0 < self.layers <= int(layer[1])
        ):
            return "a layer beyond the model's, for predicting several tokens"
        return None

    def _why_special(self, module: str, shape: tuple[int, ...], experts: bool) -> Why | str | None:
        if _ROUTER.search(module):
            return Why.ROUTER
        parent, _, leaf = module.rpartition(".")
        if not experts and _above("a single expert", parent):
            return Why.EXPERT
        if leaf == "weights_proj":
            return READ  # of sparse attention's indexer
        if leaf in ("x_proj", "dt_proj", "out_proj") and f"{parent}.D" in self.shapes:
            return "state-space kernels read this weight directly"
        if leaf == "out_proj" and f"{parent}.in_proj_weight" in self.shapes:
            return "nn.MultiheadAttention reads this weight directly"
        if shape[0] < FEWEST_ROWS:
            return Why.FEW_ROWS
        return None

    def why_unsure(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Why a matrix that looks like an `nn.Linear` may be none: the detail of Why.UNSURE."""
        bias = self.shapes.get(f"{module}.bias")
        if (
            bias == (shape[0],)
            or self._is_linear_by_family(module)
            or is_transposed(module, self.families)
        ):
            return None
        if module in self.names_in_blocks:
            return None
        if bias is not None:
            return f"its bias has shape {list(bias)}"
        if not _in_layer(module):
            return "outside the layers and without a bias"
        return None

    def is_float32_by_design(self, tensor: TensorInfo) -> bool:
        """Whether a kept tensor that is stored in float32 has to stay so.

        transformers casts what it loads to what the model asks for, except `*.weight` (from 5.21
        on); those of routers stay in float32 when the rest of the checkpoint is not.
        """
        if tensor.dtype != "F32":
            return False
        if _FLOAT32.search(tensor.name):
            return True
        module = module_of(tensor.name)
        if any(family.float32 and re.search(family.float32, module) for family in self.families):
            return True
        is_parameter = not tensor.name.endswith((".weight", ".bias"))
        return self.mostly_half and (is_parameter or _ROUTER.search(module) is not None)

    def _is_linear_by_family(self, module: str) -> bool:
        return any(family.linear and re.search(family.linear, module) for family in self.families)


@lru_cache(maxsize=4096)
def _above(what: str, parent: str) -> re.Match[str] | None:
    """What of _ABOVE is above a module; kept, as a checkpoint may have 100 000 in groups below one
    parent.
    """
    return _ABOVE[what].search(f"{parent}." if parent else "")


def _in_layer(module: str) -> bool:
    return _above("a number", module.rpartition(".")[0]) is not None


def _in_tower(module: str) -> bool:
    outside = _ABOVE["a number"].split(module)[0].split(".")
    return any(_TOWER.match(part) for part in outside)


def numbers_of(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(key, value) of every integer in a config."""
    return (
        (key, value)
        for _, level in levels(config)
        for key, value in level.items()
        if isinstance(value, int)
    )
