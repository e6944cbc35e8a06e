"""Finds out in which order an adapter of experts stores the columns of lora_B.

The factors of all experts of a layer are stacked: lora_A is [experts · rank, in], the rank of the
first expert before that of the second. lora_B is [out, rank · experts], in one of two orders:

    rank-major      column k · experts + e is column k of expert e: PEFT (ParamWrapper), vLLM, and
                    Unsloth since 2026-09-17
    expert-major    column e · rank + k is: Unsloth before that, in training and in what it saved

The shapes are the same, and a merge in the wrong order gives a model that runs and is wrong
(unsloth#6930, unsloth-zoo#1269). Newer releases of Unsloth write the order into
adapter_config.json. Older ones wrote nothing, so their adapters are refused until the user says it.
"""

import json
from typing import Final, get_args

from nf4conv.errors import SourceError
from nf4conv.options import LoraExperts
from nf4conv.sources.adapters.adapter import Adapter
from nf4conv.sources.weight_files import ADAPTER_CONFIG

_MARK: Final = "lora_B_layout"
"""The key of adapter_config.json in which Unsloth writes the order."""

_MARKED: Final = {"rank_major": "rank-major", "grouped_by_expert": "expert-major"}
"""The order by what Unsloth calls it."""

_LONGEST_CARD: Final = 2**20  # bytes of a README that are looked at


def is_expert_major(adapter: Adapter, path: str, rank: int, experts: int) -> bool:
    """Returns True if the columns of lora_B are sorted by expert, False if by rank.

    Args:
        adapter: the adapter.
        path: the parameter, for errors.
        rank: the rank of each expert.
        experts: the number of experts whose factors are stacked.

    Raises:
        SourceError: Unsloth made the adapter, and nothing tells the order.
    """
    if rank == 1 or experts == 1:  # both orders are the same
        return False
    order = _marked_order(adapter) or adapter.lora_experts
    if order is None and _is_of_unsloth(adapter):
        raise SourceError(
            f"{adapter.place}: {path}: Unsloth made this adapter and packed the experts' lora_B "
            f"in one of two orders, and nothing tells which: give --lora-experts expert-major if "
            f"it was trained before 2026-09-17, or else --lora-experts rank-major"
        )
    return order == "expert-major"


def _marked_order(adapter: Adapter) -> str | None:
    """Returns the order that the adapter's config names; None if it names none."""
    marked = adapter.config.get(_MARK)
    if marked is None:
        return None
    if marked not in _MARKED:
        raise SourceError(
            f"{adapter.place}/{ADAPTER_CONFIG}: {_MARK} is {marked!r:.50}, expected "
            f"{' or '.join(_MARKED)}"
        )
    order = _MARKED[marked]
    assert order in get_args(LoraExperts)
    return order


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
