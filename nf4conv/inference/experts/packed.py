"""PackedExperts holds the E matrices of one projection of a layer, packed to 4 bits as on disk.

Two layouts on disk become this one. Experts that were packed one by one have nested scales of their
own; a stack of experts that was packed as one tensor has one nested quantization, and its nested
blocks of 256 absmax run over the borders of experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nf4conv.codec.backends import backend
from nf4conv.codec.ops import check_decodable
from nf4conv.codec.quant_state import Decoding, QuantState
from nf4conv.codec.reference.dequantize import flushed
from nf4conv.errors import CodecError
from nf4conv.format.codebook import NESTED_BLOCKSIZE
from nf4conv.format.layout import block_count

TENSORS = ("codes", "absmax", "nested_absmax", "nested_quant_map", "nested_offset")
"""The names of all tensors, in the order in which `tensors` returns them."""


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """E matrices [rows, columns] in 4 bits.

    Attributes:
        codes: [E, ceil(rows · columns / 2)] uint8: two codes a byte, the even element's in the high
            nibble.
        absmax: [E, blocks] float32, or uint8 codes with double quantization.
        quant_type: "nf4" or "fp4".
        blocksize: elements that share one absmax.
        rows, columns: of each matrix.
        nested_absmax: flat float32, one for each nested block; None without double quantization.
        nested_quant_map: [256] float32; None without double quantization.
        nested_offset: float32, [E], or [1] for all; None without double quantization.
        nested_blocks_per_expert: nested blocks of each expert; None if one nested quantization
            covers the whole stack, or there is none.
    """

    codes: torch.Tensor
    absmax: torch.Tensor
    quant_type: str
    blocksize: int
    rows: int
    columns: int
    nested_absmax: torch.Tensor | None = None
    nested_quant_map: torch.Tensor | None = None
    nested_offset: torch.Tensor | None = None
    nested_blocks_per_expert: int | None = None

    @property
    def experts(self) -> int:
        """The number of matrices."""
        return self.codes.shape[0]

    @property
    def device(self) -> torch.device:
        """The device that holds all tensors."""
        return self.codes.device

    @property
    def nested(self) -> bool:
        """True with double quantization: absmax is quantized too."""
        return self.nested_absmax is not None

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the tensors that are there by their names, always in the order of TENSORS."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> "PackedExperts":
        """Returns the same experts with other tensors, by the names of `tensors`."""
        changed: dict[str, Any] = dict(tensors)
        return replace(self, **changed)

    def to(self, device: torch.device | str) -> "PackedExperts":
        """Returns the same experts on another device; this one if they are there."""
        if torch.device(device) == self.device:
            return self
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return self.with_tensors(moved)


def stack_experts(packed: Sequence[torch.Tensor], states: Sequence[QuantState]) -> PackedExperts:
    """Gathers the codes and states of experts that were packed one by one.

    Raises CodecError if one is no matrix or not whole, or two differ in shape or format.
    """
    first = states[0]
    if len(first.shape) != 2:
        raise CodecError(f"an expert has the shape {list(first.shape)}, expected a matrix")
    rows, columns = first.shape
    for expert, (codes, state) in enumerate(zip(packed, states, strict=True)):
        check_decodable(codes, state, state.shape.numel())
        if _format_of(state) != _format_of(first):
            raise CodecError(
                f"expert {expert} is {_format_of(state)}, but expert 0 {_format_of(first)}: "
                f"the experts of a layer share one shape and format"
            )
    all_codes = torch.stack([one.view(torch.uint8).reshape(-1) for one in packed])
    absmax = torch.stack([state.absmax.reshape(-1) for state in states])
    stacked = PackedExperts(all_codes, absmax, first.quant_type, first.blocksize, rows, columns)
    nested = [state.state2 for state in states if state.state2 is not None]
    offsets = [state.offset.reshape(1) for state in states if state.offset is not None]
    if nested:
        stacked = replace(
            stacked,
            nested_absmax=torch.cat([state2.absmax.reshape(-1) for state2 in nested]),
            nested_quant_map=nested[0].code,
            nested_offset=torch.cat(offsets),
            nested_blocks_per_expert=block_count(absmax.shape[1], NESTED_BLOCKSIZE),
        )
    return stacked


def split_stack(packed: torch.Tensor, state: QuantState) -> PackedExperts:
    """Takes a stack [E, rows, columns] that was packed as one tensor.

    Raises CodecError if it is no stack or not whole, or a block belongs to two experts.
    """
    check_decodable(packed, state, state.shape.numel())
    if len(state.shape) != 3:
        raise CodecError(f"the stack has the shape {list(state.shape)}, expected three dimensions")
    experts, rows, columns = state.shape
    if (rows * columns) % state.blocksize:
        raise CodecError(
            f"experts of {rows} × {columns} do not fill blocks of {state.blocksize}: "
            f"a block belongs to two of them"
        )
    split = PackedExperts(
        codes=packed.view(torch.uint8).reshape(experts, -1),
        absmax=state.absmax.reshape(experts, -1),
        quant_type=state.quant_type,
        blocksize=state.blocksize,
        rows=rows,
        columns=columns,
    )
    if state.state2 is not None and state.offset is not None:
        nested = state.state2
        split = replace(
            split,
            nested_absmax=nested.absmax.reshape(-1),
            nested_quant_map=nested.code,
            nested_offset=state.offset.reshape(1),
        )
    return split


def _format_of(state: QuantState) -> str:
    """Returns in words what experts of a layer have in common."""
    shape = " × ".join(map(str, state.shape))
    nested = ", double quantization" if state.state2 is not None else ""
    return f"{shape} {state.quant_type}, blocks of {state.blocksize}{nested}"


def decode(packed: PackedExperts, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decodes experts, [n] of them, to [n, rows, columns], contiguous."""
    codes = packed.codes.index_select(0, ids)
    absmax = decoded_absmax(packed, ids)
    shape = (codes.shape[0], packed.rows, packed.columns)
    out = torch.empty(shape, dtype=dtype, device=packed.device)
    functions = backend(packed.device)
    if (packed.rows * packed.columns) % packed.blocksize == 0:
        pieces = [(codes.view(-1), absmax.view(-1), out.view(-1))]
    else:  # the last block of each expert is shorter
        pieces = []
        for i in range(out.shape[0]):
            pieces.append((codes[i], absmax[i], out[i].view(-1)))
    for piece, scales, target in pieces:
        decoding = Decoding(scales, packed.quant_type, packed.blocksize)
        functions.dequantize_blocks(piece, decoding, target)
    return out


def decoded_absmax(packed: PackedExperts, ids: torch.Tensor) -> torch.Tensor:
    """Returns the absmax of experts as they decode, [n, blocks] float32.

    A nested one is a flushed product, then a sum, each rounded.
    """
    absmax = packed.absmax.index_select(0, ids)
    if packed.nested_absmax is None or packed.nested_quant_map is None:
        return absmax
    assert packed.nested_offset is not None
    block = nested_blocks(packed, ids)
    scale = flushed(packed.nested_absmax).index_select(0, block.view(-1)).view(block.shape)
    values = flushed(packed.nested_quant_map).index_select(0, absmax.view(-1).int())
    offset = packed.nested_offset
    if offset.numel() > 1:
        offset = offset.index_select(0, ids)[:, None]
    return flushed(values.view(absmax.shape) * scale) + offset


def nested_blocks(packed: PackedExperts, ids: torch.Tensor) -> torch.Tensor:
    """Returns the index of the nested block of each absmax of experts: [n, blocks] int64."""
    blocks = packed.absmax.shape[1]
    within = torch.arange(blocks, device=ids.device)
    expert = ids.long()[:, None]
    if packed.nested_blocks_per_expert is None:
        return (expert * blocks + within) // NESTED_BLOCKSIZE
    return expert * packed.nested_blocks_per_expert + within // NESTED_BLOCKSIZE
