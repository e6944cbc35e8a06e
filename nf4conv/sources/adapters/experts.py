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
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Final, NamedTuple

from nf4conv.errors import SourceError
from nf4conv.models.experts import FUSED, USUAL_NAMES, stack_name
from nf4conv.models.families import layouts_of
from nf4conv.models.family_table import GPT_OSS
from nf4conv.sources.adapters.adapter import Adapter, Targeted
from nf4conv.sources.adapters.modules import Base, factors_of, misfit
from nf4conv.sources.arranged import LowRankDelta
from nf4conv.sources.files import ADAPTER_CONFIG
from nf4conv.sources.tensors import TensorInfo

_OTHER_NAMES: Final = {usual: other for other, usual in USUAL_NAMES.items()}

_LONGEST_CARD: Final = 2**20  # bytes of a README that are looked at


class _Place(NamedTuple):
    """A tensor on disk that holds a parameter, or a part of it."""

    tensor: TensorInfo
    expert: int | None = None  # which expert the tensor is; None if it holds all of them
    share: int = 0  # which part of the expert's rows it is
    shares: int = 1  # how many such parts there are
    is_interleaved: bool = False  # True if rows of the parts alternate in the parameter
    is_transposed: bool | None = None  # None if shapes, and what is beside it, tell


def changes_of_parameters(
    base: Base, adapter: Adapter, module: str, parts: Sequence[Targeted]
) -> Iterator[tuple[TensorInfo, LowRankDelta]]:
    """Yields what an adapter does to the parameters of a module, of which the outermost wrapper
    comes first in `parts`.
    """
    leaves = set()
    for target in adapter.target_parameters:
        leaf = target.rpartition(".")[2]
        if adapter.targets(f"{module}.{leaf}") and _places_of(base, module, leaf):
            leaves.add(leaf)
    if len(leaves) != len(parts):
        raise base.lacks(adapter, module)
    # PEFT wraps the fused ones first, in this order
    in_order = [leaf for leaf in FUSED if leaf in leaves] + sorted(leaves - FUSED.keys())
    for part, leaf in zip(parts, reversed(in_order), strict=True):
        yield from _changes_of_parameter(base, adapter, part, leaf)


def _places_of(base: Base, module: str, leaf: str) -> list[_Place]:
    """Returns all tensors on disk that hold a parameter; none if the source lacks it."""
    found = base.find(f"{module}.{leaf}")
    if found is not None:
        return [_Place(found)]
    renamed = _stack_of_another_name(base, module, leaf)
    if renamed is not None:
        return [renamed]
    if leaf in FUSED and base.find(f"{module}.{leaf}s.0.weight") is not None:  # Unsloth's gpt-oss
        singles = _numbered(base, f"{module}.{leaf}s", "weight")
        return [_Place(single, expert) for expert, single in enumerate(singles)]
    if leaf not in FUSED:
        return []
    # rows of gate and up alternate in the parameter
    of_gpt_oss = any(layout is GPT_OSS for layout in layouts_of(base.config))
    is_interleaved = leaf == "gate_up_proj" and of_gpt_oss
    for names in ({}, _OTHER_NAMES):
        down = names.get("down_proj", "down_proj")
        if base.find(f"{module}.0.{down}.weight") is None:
            continue
        places = []
        shares = len(FUSED[leaf])
        for share, projection in enumerate(FUSED[leaf]):
            name = names.get(projection, projection)
            for expert, single in enumerate(_numbered(base, module, f"{name}.weight")):
                places.append(_Place(single, expert, share, shares, is_interleaved))
        return places
    return []


def _stack_of_another_name(base: Base, module: str, leaf: str) -> _Place | None:
    """Returns a stack that is not called on disk what it is in memory; None if there is none."""
    for layout in layouts_of(base.config):
        for stack in layout.stacks:
            if stack.projections != FUSED.get(leaf):
                continue
            name = stack_name(module, stack, layout)
            found = None if name is None else base.find(name)
            if found is not None and not stack.is_interleaved:
                return _Place(found, is_transposed=stack.is_transposed)
    return None


def _numbered(base: Base, module: str, name: str) -> Iterator[TensorInfo]:
    """Yields the tensors of this name, expert by expert, until there is none."""
    for expert in count():
        found = base.find(f"{module}.{expert}.{name}")
        if found is None:
            return
        yield found


def _changes_of_parameter(
    base: Base, adapter: Adapter, part: Targeted, leaf: str
) -> Iterator[tuple[TensorInfo, LowRankDelta]]:
    """Yields what is added to the experts that a parameter stacks (PEFT: ParamWrapper)."""
    path = f"{part.module}.{leaf}"
    up, down, _ = factors_of(adapter, part)
    if len(part.tensors) != 2:
        raise SourceError(
            f"{adapter.file}: {path}: LoRA of a parameter has lora_A and lora_B, and nothing else",
            path=adapter.file,
        )
    places = _places_of(base, part.module, leaf)
    first = places[0]
    if first.expert is None:
        if len(first.tensor.shape) != 3:
            raise misfit(adapter, up, first.tensor)
        experts = first.tensor.shape[0]
    else:
        experts = len(places) // first.shares
    rank = adapter.rank(path)
    if down.shape[0] != rank * experts or up.shape[1] != rank * experts:
        more = f" for {experts} experts and the rank {rank} of its config"
        raise misfit(adapter, down, first.tensor, more)
    if rank > 1 and experts > 1:
        _require_rank_major(adapter)
    for place in places:
        height = up.shape[0] // place.shares
        rows = None
        if place.is_interleaved:
            rows = (place.share, up.shape[0])
        elif place.shares > 1:
            rows = (place.share * height, (place.share + 1) * height)
        delta = LowRankDelta(
            up,
            down,
            adapter.scale(path),
            is_transposed=_is_transposed(base, adapter, part, place),
            rows=rows,
            row_step=place.shares if place.is_interleaved else 1,
            experts=experts,
            expert=place.expert,
        )
        yield place.tensor, delta


def _is_transposed(base: Base, adapter: Adapter, part: Targeted, place: _Place) -> bool:
    """Returns True if the matrices at a place are stored as [in, out]; raises a SourceError if they
    are neither the product of the factors nor that transposed.
    """
    up, down, _ = factors_of(adapter, part)
    made = (up.shape[0] // place.shares, down.shape[1])
    stored = place.tensor.shape[-2:]
    if stored not in (made, made[::-1]):
        raise misfit(adapter, up, place.tensor, f" by way of {list(down.shape)}")
    if made[0] != made[1]:
        return stored != made
    if place.is_transposed is not None:
        return place.is_transposed
    return _is_stack_transposed(base, part.module)


def _is_stack_transposed(base: Base, module: str) -> bool:
    """Returns True if experts are stacked as [in, out], seen by both parameters of a module.

    The shape of one alone does not tell for the square experts of GPT-OSS.
    """
    gate_up = base.find(f"{module}.gate_up_proj")
    down = base.find(f"{module}.down_proj")
    if gate_up is None or down is None:
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
