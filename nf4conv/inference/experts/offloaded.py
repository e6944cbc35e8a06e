"""Experts of a layer in host memory, and a cache of some of them on the GPU.

All that an expert has, its codes and scales in every projection, lies in one piece of memory. So it
is fetched by one copy. Which experts are needed must be known on the host; fetching them waits for
the router, and nothing else.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from nf4conv.errors import CodecError
from nf4conv.inference.experts.packed import PackedExperts

ALIGNMENT = 128  # bytes, of every piece of an expert


class OffloadedLayer:
    """The experts of a layer in host memory, with a cache of `slots` of them.

    Attributes:
        host: the projections, as views of host memory.
        cached: the projections of the cache; an expert of it is a slot.
        slots: how many experts the cache holds.
        hits, misses: experts that were found in the cache when they were needed, and that were not.
    """

    def __init__(self, stacks: Sequence[PackedExperts], slots: int, device: torch.device) -> None:
        """Copies the experts to host memory, pinned where there is a GPU.

        Raises:
            CodecError: nested blocks run over experts' borders, so that no expert has its own.
        """
        experts = stacks[0].experts
        size = sum(map(expert_bytes, stacks))
        self.slots = min(slots, experts)
        pinned = torch.cuda.is_available()
        self._host = torch.empty((experts, size), dtype=torch.uint8, pin_memory=pinned)
        self._cache = torch.empty((self.slots, size), dtype=torch.uint8, device=device)
        self.host = _views(stacks, self._host)
        self.cached = _views(stacks, self._cache)
        for stack, own in zip(stacks, self.host, strict=True):
            for name, tensor in own.tensors().items():
                if name != "nested_quant_map":
                    tensor.copy_(getattr(stack, name).view(tensor.shape))
        self._slot_of: OrderedDict[int, int] = OrderedDict()  # by expert, the oldest use first
        self._table = torch.full((experts,), -1, dtype=torch.int64, device=device)
        self.hits = 0
        self.misses = 0

    def fetch(self, experts: Sequence[int]) -> torch.Tensor:
        """Brings experts to the cache.

        Args:
            experts: at most `slots`, each once.

        Returns:
            [E] int64: the slot of each of these experts, -1 for all others.
        """
        wanted = set(experts)
        for expert in experts:
            slot = self._slot_of.get(expert)
            if slot is None:
                self.misses += 1
                slot = self._free_slot(wanted)
                self._slot_of[expert] = slot
                self._cache[slot].copy_(self._host[expert], non_blocking=True)
            else:
                self.hits += 1
            self._slot_of.move_to_end(expert)
        table = torch.full(self._table.shape, -1, dtype=torch.int64)
        for expert in experts:
            table[expert] = self._slot_of[expert]
        self._table.copy_(table)
        return self._table

    def _free_slot(self, wanted: set[int]) -> int:
        """Returns a slot that is free, or that of the expert whose last use is longest ago."""
        if len(self._slot_of) < self.slots:
            return len(self._slot_of)
        oldest = next(expert for expert in self._slot_of if expert not in wanted)
        return self._slot_of.pop(oldest)


def expert_bytes(packed: PackedExperts) -> int:
    """Returns the bytes of one expert of a stack, each piece aligned.

    Raises:
        CodecError: nested blocks run over experts' borders.
    """
    return sum(_aligned(_nbytes(tensor)) for tensor in _pieces(packed).values())


def _pieces(packed: PackedExperts) -> dict[str, torch.Tensor]:
    """Returns what each expert has of its own, as [E, …]."""
    pieces = {"codes": packed.codes, "absmax": packed.absmax}
    if packed.nested_absmax is None or packed.nested_offset is None:
        return pieces
    if packed.nested_blocks_per_expert is None or packed.nested_offset.numel() == 1:
        raise CodecError(
            "experts that were packed as one stack cannot be fetched one by one: "
            "quantize with moe='packed'"
        )
    pieces["nested_absmax"] = packed.nested_absmax.view(packed.experts, -1)
    pieces["nested_offset"] = packed.nested_offset.view(packed.experts, 1)
    return pieces


def _nbytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of one expert's piece."""
    return tensor.shape[1] * tensor.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _views(stacks: Sequence[PackedExperts], memory: torch.Tensor) -> list[PackedExperts]:
    """Returns stacks whose experts lie in rows of memory, [n, bytes]."""
    made = []
    start = 0
    for stack in stacks:
        views: dict[str, Any] = {}
        for name, tensor in _pieces(stack).items():
            size = _nbytes(tensor)
            views[name] = memory[:, start : start + size].view(tensor.dtype)
            start += _aligned(size)
        quant_map = stack.nested_quant_map
        if quant_map is not None:
            quant_map = quant_map.to(memory.device)
        made.append(replace(stack, nested_quant_map=quant_map, **views))
    return made
