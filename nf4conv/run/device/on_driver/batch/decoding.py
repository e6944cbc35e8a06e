"""Encoded tensors decoded on the GPU: the kernels that it takes, and their launches.

GPTQ and AWQ store a weight by its columns. A piece of it, some of its rows, is a run in each line
of its tensors. So these are brought to the GPU as they are, and stay there until all pieces are
taken.
"""

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from nf4conv.errors import CodecError
from nf4conv.format.dtypes import DTYPE_BITS, DTYPE_NAMES
from nf4conv.run.device.on_driver.batch.buffers import Launch
from nf4conv.run.device.on_driver.batch.input import BatchInput
from nf4conv.run.device.on_driver.kernels import Kernels, Purpose
from nf4conv.sources.arranged import Columns
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit, packed_in_order
from nf4conv.sources.foreign.integers import PackedIntegers
from nf4conv.sources.tensors import TensorInfo

_Addresses = Mapping[str, int]
"""Where the parts of a tensor are on the GPU, by role."""


class Places(NamedTuple):
    """Says where the parts of a tensor are, by role."""

    # in the input. An encoded tensor has a "number" besides: room for a float32 that the host knows
    positions: dict[str, int]
    # addresses of what stays on the GPU while the pieces of a weight are taken
    kept: Mapping[str, int] = MappingProxyType({})


def kernels_for_tensor(tensor: TensorInfo, steps: Sequence[str]) -> frozenset[Purpose] | None:
    """Tells which kernels decode a tensor, or a piece of one, and cast it.

    Args:
        tensor: as it is stored.
        steps: tags of the dtypes that it goes through, from what it is stored in, or decoded to.

    Returns:
        The kernels; None if there are none for it.
    """
    found = set()
    if tensor.encoding is not None:
        purpose = _decoding_purpose(tensor, steps[0])
        if purpose is None:
            return None
        found.add(purpose)
    for step in pairwise(steps):
        if step[0] not in DTYPE_NAMES or step[1] not in DTYPE_NAMES:
            return None
        found.add(Purpose("caster", step))
    return frozenset(found)


def _decoding_purpose(tensor: TensorInfo, tag: str) -> Purpose | None:
    """Tells which kernels decode a tensor to the dtype of a tag; None if there are none."""
    if tensor.encoding is None or tag not in DTYPE_NAMES or tensor.elements == 0:
        return None
    kernel = tensor.encoding.kernel(tensor)
    if kernel is None:
        return None
    of_4_bits = isinstance(tensor.encoding, Bitsandbytes4bit)
    return Purpose(kernel.maker, (DTYPE_NAMES[tag] if of_4_bits else tag, *kernel.details))


def add_tensor(batch: BatchInput, tensor: TensorInfo) -> Places:
    """Adds all that is needed of a tensor, or a piece of it; returns where its parts will be."""
    if tensor.encoding is None:
        return Places({"values": batch.add(tensor.file_range)})
    # the kernels have bitsandbytes' code map, and what its quant state says is known
    unread: tuple[str, ...] = ()
    packed = packed_in_order(tensor)
    if packed is not None:
        unread = ("quant_map", packed.quant_state_role)
    places = Places({}, _keep_matrices(batch, tensor))
    for role, part in tensor.encoding.parts:
        if role not in unread and role not in places.kept:
            places.positions[role] = batch.add(part.file_range)
    # a number that the host knows: nested_offset, or the scale where there is none
    places.positions["number"] = batch.take(4)
    return places


def decode_launch(
    batch: BatchInput, tensor: TensorInfo, placed: Places, tag: str, target: int
) -> Launch:
    """Returns the launch that decodes a tensor.

    Args:
        batch: the input, which has been read.
        tensor: an encoded tensor for which `kernels_for_tensor` has found kernels.
        placed: where its parts are, from `add_tensor`.
        tag: the dtype that it is decoded to.
        target: the address of the result. Of a packed weight it may be any that suits its dtype,
            of others it is a multiple of 16.
    """
    purpose = _decoding_purpose(tensor, tag)
    assert purpose is not None
    kernels = batch.buffers.gpu.kernels[purpose]
    positions = placed.positions
    places = {role: batch.address(position) for role, position in positions.items()}
    encoding = tensor.encoding
    assert encoding is not None
    if isinstance(encoding, Bitsandbytes4bit):
        batch.put(positions["number"], encoding.nested_offset)
        return _unpack(tensor, places, kernels, target)
    batch.put(positions["number"], 1.0)
    if isinstance(encoding, PackedIntegers) and encoding.group_index is not None:
        _check_group_index(batch, tensor, encoding, positions["group_index"])
    kernel = encoding.kernel(tensor)
    assert kernel is not None
    places |= {**kernels.tables, **placed.kept}
    addresses = [places.get(role, places["number"]) for role in kernel.pointers]
    rows, columns = kernel.shape
    tiles_of_row = -(-columns // kernels.numbers["columns"])
    programs = -(-rows // kernels.numbers["rows"]) * tiles_of_row
    arguments = (*addresses, target, rows, columns, tiles_of_row, *kernel.numbers)
    return Launch(kernels.functions["decode"], programs, arguments)


def _unpack(tensor: TensorInfo, places: _Addresses, kernels: Kernels[int], target: int) -> Launch:
    """Returns the launch that decodes a weight that bitsandbytes packed to 4 bits."""
    scales = "nested" if "nested_absmax" in places else "plain"
    is_aligned = tensor.elements % kernels.numbers["slot"] == 0 and target % 16 == 0
    alignment = "aligned" if is_aligned else "any"
    absmax = places["absmax"]
    arguments = (
        places["values"],
        absmax,
        places.get("nested_quant_map", absmax),
        places.get("nested_absmax", absmax),
        places["number"],
        kernels.tables["values"],
        target,
        tensor.elements,
    )
    programs = -(-tensor.elements // kernels.numbers["tile"])
    return Launch(kernels.functions[f"{scales}_{alignment}"], programs, arguments)


def _keep_matrices(batch: BatchInput, tensor: TensorInfo) -> dict[str, int]:
    """Brings what a piece of a weight is cut out of to the GPU, unless it is there.

    Returns:
        The address of each part that is columns of a matrix, by role.
    """
    found: dict[str, Columns] = {}
    assert tensor.encoding is not None
    for role, part in tensor.encoding.parts:
        if isinstance(part.encoding, Columns):
            found[role] = part.encoding
    if not found:
        return {}
    addresses = batch.keep(tuple(columns.values.file_range for columns in found.values()))
    places = {}
    for (role, columns), address in zip(found.items(), addresses, strict=True):
        places[role] = address + columns.first * DTYPE_BITS[columns.values.dtype] // 8
    return places


def _check_group_index(
    batch: BatchInput, tensor: TensorInfo, encoding: PackedIntegers, position: int
) -> None:
    """Checks the group of each column in what has been read, and sets it where it never was.

    Args:
        batch: the input.
        tensor: the weight, or a piece of it.
        encoding: its encoding, which has a group index.
        position: where the index is in the input.

    Raises:
        CodecError: it names a group that there is not.
    """
    part = encoding.group_index
    assert part is not None
    raw = batch.buffers.source.view[position:][: part.nbytes].cast("B")
    letter: Literal["i", "q"] = "i" if part.dtype == "I32" else "q"
    in_order = _groups_in_order(encoding.codes.columns, encoding.codes.group_size, letter)
    if bytes(raw) == in_order or part.file_range == batch.buffers.checked:
        return
    groups = encoding.scale.shape[0]
    if encoding.codes.packing == "compressed-tensors":
        groups = encoding.scale.elements // tensor.shape[0]
    index = raw.cast(letter)
    least = min(index)
    if encoding.codes.packing == "compressed-tensors" and least == -1:
        raw[:] = in_order
    elif least < 0 or max(index) >= groups:
        raise CodecError.about(
            tensor.file,
            tensor.name,
            f"its group index names a group that is none of its {groups}",
        )
    else:
        batch.buffers.checked = part.file_range


@lru_cache(maxsize=16)
def _groups_in_order(columns: int, group_size: int, letter: Literal["i", "q"]) -> bytes:
    """Returns the bytes of a group index that changes no order."""
    return array(letter, (column // group_size for column in range(columns))).tobytes()
