"""Shards packed experts over processes, as FSDP2 does: each process keeps some whole experts.

`torch.distributed.fsdp.fully_shard` cuts a parameter into as many pieces as there are processes,
and gathers the pieces before the layer computes. A piece of Experts4bit is an Experts4bit of fewer
experts; what is gathered are its tensors as they are, in 4 bits.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from nf4conv.errors import PlanError
from nf4conv.inference.experts.packed import PackedExperts, decoded_absmax
from nf4conv.inference.moe.tensor import OPERATIONS, Experts4bit

aten = torch.ops.aten

# ---------------------------------------------------------------- what FSDP2 calls


def fsdp_pre_all_gather(
    shard: Experts4bit,
    mesh: Any,  # noqa: ARG001 - FSDP2 counts the arguments
) -> tuple[tuple[torch.Tensor, ...], None]:
    """Returns what FSDP2 is to gather from all processes. Is a method of Experts4bit."""
    return _shared_tensors(shard), None


def fsdp_post_all_gather(
    shard: Experts4bit,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: None,  # noqa: ARG001
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Makes all experts of the tensors of all processes, which are not copied and stay where they
    are. Is a method of Experts4bit.

    Returns the experts, and the tensors in them; None if `out` is given, what this returned the
    first time, which shows the tensors already.
    """
    if out is not None:
        return None
    remaining = iter(all_gather_outputs)
    parts = tuple(
        part.with_tensors({name: next(remaining) for name in _shared(part)})
        for part in shard.weight.parts
    )
    weight = replace(shard.weight, parts=parts)
    return Experts4bit(weight, param_dtype, shard.shown), all_gather_outputs


def _shared_tensors(shard: Experts4bit) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that have a share for each expert, part by part."""
    return tuple(tensor for part in shard.weight.parts for tensor in _shared(part).values())


def _shared(part: PackedExperts) -> dict[str, torch.Tensor]:
    """Returns the tensors of one part that have a share for each expert."""
    tensors = part.tensors()
    tensors.pop("nested_quant_map", None)
    return tensors


# ---------------------------------------------------------------- operations that FSDP2 uses


def _split(tensor: Experts4bit, size: int, dim: int = 0) -> Any:
    """Cuts experts into pieces of `size` experts; raises PlanError if they would not be equal."""
    if dim != 0 or not _is_whole(tensor):
        return NotImplemented
    experts = tensor.shape[0]
    if experts % size:
        raise _unequal(tensor)
    return [_piece(tensor, start, start + size) for start in range(0, experts, size)]


def _new_empty(tensor: Experts4bit, size: Sequence[int], **_: Any) -> Any:
    """Raises PlanError for an empty piece: FSDP2 asks for it if there are more processes than
    experts.
    """
    if list(size) == [0]:
        raise _unequal(tensor)
    return NotImplemented


def _unequal(tensor: Experts4bit) -> PlanError:
    return PlanError(
        f"4-bit experts of shape {list(tensor.shape)} cannot be cut into equal pieces: FSDP2 "
        f"shards them over a number of processes that divides the number of experts, or leaves "
        f"them whole (ignored_params)"
    )


def _new_zeros(tensor: Experts4bit, size: Sequence[int], **_: Any) -> Any:
    """Makes room for a piece, which is then copied into it."""
    if not _is_whole(tensor) or tuple(size[1:]) != tuple(tensor.shape[1:]):
        return NotImplemented
    return _piece(tensor, 0, size[0])


def _copy(target: Any, source: Any, *_: Any) -> Any:
    """Copies the tensors of one piece into those of another."""
    if not isinstance(target, Experts4bit) or not isinstance(source, Experts4bit):
        return NotImplemented
    pairs = zip(_shared_tensors(target), _shared_tensors(source), strict=True)
    for own, other in pairs:
        own.copy_(other)
    return target


def _slice(
    tensor: Experts4bit,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    """Takes everything: pieces of equal size have nothing to leave out."""
    if start or step != 1 or (end is not None and end < tensor.shape[dim]):
        return NotImplemented
    return tensor.with_view(tensor.shown)


def _as_strided(tensor: Experts4bit, size: Sequence[int], *_: Any) -> Any:
    """Shows the tensor in the shape that it has."""
    if tuple(size) != tuple(tensor.shape):
        return NotImplemented
    return tensor.with_view(tensor.shown)


def _is_whole(tensor: Experts4bit) -> bool:
    """Returns whether a tensor shows all experts of its weight."""
    return tensor.shown.ids is None and not tensor.shown.is_single


def _piece(tensor: Experts4bit, start: int, end: int) -> Experts4bit:
    """Returns the experts from `start` to `end`, with tensors of their own."""
    parts = tuple(_experts_of(part, start, end) for part in tensor.weight.parts)
    return Experts4bit(replace(tensor.weight, parts=parts), tensor.dtype, tensor.shown)


def _experts_of(part: PackedExperts, start: int, end: int) -> PackedExperts:
    """Returns the experts of one part from `start` to `end`, with tensors of their own."""
    if part.nested and part.nested_blocks_per_expert is None:
        part = _without_nesting(part)
    shares = {"codes": part.codes[start:end], "absmax": part.absmax[start:end]}
    if part.nested_absmax is not None and part.nested_offset is not None:
        blocks = part.nested_blocks_per_expert or 0
        shares["nested_absmax"] = part.nested_absmax[start * blocks : end * blocks]
        shares["nested_offset"] = part.nested_offset.expand(part.experts)[start:end]
    return part.with_tensors({name: share.clone() for name, share in shares.items()})


def _without_nesting(part: PackedExperts) -> PackedExperts:
    """Decodes the scales of a stack, whose nested blocks run over the borders of experts."""
    absmax = decoded_absmax(part, torch.arange(part.experts, device=part.device))
    return replace(
        part, absmax=absmax, nested_absmax=None, nested_quant_map=None, nested_offset=None
    )


def _view(tensor: Experts4bit, shape: Sequence[int], **kwargs: Any) -> Any:
    """Flattens experts in appearance: FSDP2 asks for it, and does nothing with it."""
    if list(shape) in ([-1], [tensor.numel()]):
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
    return _same_shape(tensor, shape, **kwargs)


_same_shape = OPERATIONS[aten.view.default]


def install_sharding() -> None:
    """Gives Experts4bit the operations above, and the methods that FSDP2 looks for."""
    methods: Any = Experts4bit
    methods.fsdp_pre_all_gather = fsdp_pre_all_gather
    methods.fsdp_post_all_gather = fsdp_post_all_gather
    for operation in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        OPERATIONS[operation] = _view
    OPERATIONS[aten.split.Tensor] = _split
    OPERATIONS[aten.new_empty.default] = _new_empty
    OPERATIONS[aten.new_zeros.default] = _new_zeros
    OPERATIONS[aten.copy_.default] = _copy
    OPERATIONS[aten.slice.Tensor] = _slice
    OPERATIONS[aten.as_strided.default] = _as_strided
