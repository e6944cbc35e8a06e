"""Finds out what an adapter does to parameters that stack experts.

In memory, the experts of a layer are fused: gate_up_proj and down_proj are parameters of shape
[experts, rows, columns]. On disk they may be stacked as well, or stand one by one under the names
of their matrices.

The factors of all experts are stacked. lora_A is [experts · rank, in], the rank of the first expert
before that of the second. lora_B is [out, rank · experts], column k · experts + e is column k of
expert e (rank-major). Unsloth sorted the columns by expert until 2026-09-17: the shapes are the
same, and a merge of these would give a model that runs and is wrong (unsloth#6930).
"""

import json
import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final

from nf4conv.errors import SourceError
from nf4conv.models.experts import FUSED, USUAL_NAMES, stack_name
from nf4conv.models.families import layouts_of
from nf4conv.models.family_table import GPT_OSS
from nf4conv.sources.adapters.adapter import Adapter, Targeted
from nf4conv.sources.adapters.modules import Base, Place, delta_at
from nf4conv.sources.arranged import LowRankDelta
from nf4conv.sources.files import ADAPTER_CONFIG
from nf4conv.sources.tensors import TensorInfo

_OTHER_NAMES: Final = {usual: other for other, usual in USUAL_NAMES.items()}

_LONGEST_CARD: Final = 2**20  # bytes of a README that are looked at


def changes_of_parameters(
    base: Base, adapter: Adapter, module: str, parts: Sequence[Targeted]
) -> Iterator[tuple[TensorInfo, LowRankDelta]]:
    """Yields what an adapter does to the parameters of a module, of which the outermost wrapper
    comes first in `parts` (PEFT: ParamWrapper).
    """
    found: dict[str, list[Place]] = {}
    for target in adapter.target_parameters:
        leaf = target.rpartition(".")[2]
        if adapter.targets(f"{module}.{leaf}"):
            found[leaf] = _places_of(base, module, leaf)
    # PEFT wraps the fused ones first, in this order
    leaves = [leaf for leaf in (*FUSED, *sorted(found.keys() - FUSED.keys())) if found.get(leaf)]
    if len(leaves) != len(parts):
        raise base.lacks(adapter, module)
    for part, leaf in zip(parts, reversed(leaves), strict=True):
        path = f"{module}.{leaf}"
        if len(part.tensors) != 2:
            raise SourceError(
                f"{adapter.file}: {path}: LoRA of a parameter has lora_A and lora_B, and nothing "
                f"else",
                path=adapter.file,
            )
        if found[leaf][0].experts > 1 and adapter.rank(path) > 1:
            _require_rank_major(adapter)
        for place in found[leaf]:
            yield place.tensor, delta_at(adapter, part, path, place)


def _places_of(base: Base, module: str, leaf: str) -> list[Place]:
    """Returns all tensors on disk that hold a parameter; none if the source lacks it."""
    stack = base.find(f"{module}.{leaf}")
    if stack is not None:
        transposed = _is_stack_transposed(base, module)
        return [Place(stack, transposed, experts=math.prod(stack.shape[:1]))]
    if leaf not in FUSED:
        return []
    layouts = layouts_of(base.config)
    for layout in layouts:  # a stack that is not called on disk what it is in memory
        for kind in layout.stacks:
            name = stack_name(module, kind, layout)
            stack = None if name is None else base.find(name)
            if kind.projections == FUSED[leaf] and stack is not None and not kind.is_interleaved:
                return [Place(stack, kind.is_transposed, experts=math.prod(stack.shape[:1]))]
    usual = [f"{projection}.weight" for projection in FUSED[leaf]]
    others = [f"{_OTHER_NAMES[projection]}.weight" for projection in FUSED[leaf]]
    of_unsloth = (f"{module}.{leaf}s", ["weight"])
    for path, leaves in ((module, usual), (module, others), of_unsloth):
        found = [list(_numbered(base, path, name)) for name in leaves]
        if not all(found):
            continue
        # rows of gate and up alternate in the parameter of gpt-oss
        is_interleaved = len(found) > 1 and GPT_OSS in layouts
        places = []
        for share, singles in enumerate(found):
            for expert, single in enumerate(singles):
                place = Place(single, False, len(singles), expert, share, len(found))
                places.append(place._replace(is_interleaved=is_interleaved))
        return places
    return []


def _numbered(base: Base, path: str, name: str) -> Iterator[TensorInfo]:
    """Yields the tensors of this name, expert by expert, until there is none."""
    for expert in count():
        found = base.find(f"{path}.{expert}.{name}")
        if found is None:
            return
        yield found


def _is_stack_transposed(base: Base, module: str) -> bool:
    """Returns True if experts are stacked as [in, out], seen by both parameters of a module.

    The shape of one alone does not tell for the square experts of GPT-OSS.
    """
    gate_up = base.find(f"{module}.gate_up_proj")
    down = base.find(f"{module}.down_proj")
    if gate_up is None or down is None or len(down.shape) != 3:
        return False
    return gate_up.shape[1:] == (down.shape[2], 2 * down.shape[1])


def _require_rank_major(adapter: Adapter) -> None:
    """Raises a SourceError unless the columns of lora_B are sorted by rank; if Unsloth made the
    adapter, it has to say so.
    """
    order = adapter.config.get("lora_B_layout")
    if order == "rank_major" or (order is None and not _is_of_unsloth(adapter)):
        return
    raise SourceError(
        f"{adapter.place}/{ADAPTER_CONFIG}: lora_B_layout of this adapter of experts has to be "
        f"rank_major, but is {order!r:.50}; older releases of Unsloth wrote another order"
    )


def _is_of_unsloth(adapter: Adapter) -> bool:
    """Returns True if the adapter's config or card names Unsloth.

    It writes "unsloth_fixed" into auto_mapping and the tag "unsloth" into the card, and its users
    mostly train on its own copies of models.
    """
    if "unsloth" in json.dumps(adapter.config).lower():
        return True
    card = adapter.file.parent / "README.md"
    if not card.is_file() or card.stat().st_size > _LONGEST_CARD:
        return False
    return b"unsloth" in card.read_bytes().lower()
