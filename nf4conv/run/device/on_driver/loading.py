"""Tensors brought to the GPU: read, decoded where they are encoded, and cast.

GPTQ and AWQ store a weight by its columns. A piece of it, some of its rows, is a run in each line
of its tensors. So these are brought to the GPU as they are, and stay there until all pieces are
taken.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, NamedTuple

from nf4conv.errors import CodecError
from nf4conv.format.dtypes import DTYPE_BITS, DTYPE_NAMES
from nf4conv.run.device.on_driver.buffers import FLAG, BatchInput, DriverBuffers, Launch
from nf4conv.run.device.on_driver.kernels import Kernels, Purpose
from nf4conv.run.pieces import aligned, bytes_of, starts
from nf4conv.sources.arranged import Columns
from nf4conv.sources.foreign.bitsandbytes import Bitsandbytes4bit
from nf4conv.sources.foreign.integers import PackedIntegers
from nf4conv.sources.tensors import TensorInfo


class Places(NamedTuple):
    """Says where the parts of a tensor are, by role."""

    # in the input. An encoded tensor has a "number" besides: room for a float32 that the host knows
    positions: dict[str, int]
    # addresses of what stays on the GPU while the pieces of a weight are taken
    kept: Mapping[str, int] = MappingProxyType({})


def kernels_for_tensor(tensor: TensorInfo, steps: Sequence[str]) -> frozenset[Purpose] | None:
    """Tells which kernels decode a tensor, or a piece of one, and cast it; None without any.

    Steps are the tags of the dtypes that it goes through, from what it is stored in, or decoded to.
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
    return Purpose(kernel.maker, (tag, *kernel.details))


def add_tensor(batch: BatchInput, tensor: TensorInfo) -> Places:
    """Adds all that is needed of a tensor, or a piece of it; returns where its parts will be."""
    if tensor.encoding is None:
        return Places({"values": batch.add(tensor.file_range)})
    # the kernels have bitsandbytes' code map, and what its quant state says is known
    unread = ("quant_map", "quant_state")
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
    """Returns the launch that decodes a tensor to the dtype of a tag, once the input has been read.

    The address of the result is a multiple of 16; of a packed weight, of its dtype's size.
    """
    purpose = _decoding_purpose(tensor, tag)
    assert purpose is not None
    kernels = batch.buffers.gpu.kernels[purpose]
    positions = placed.positions
    places = {role: batch.address(position) for role, position in positions.items()}
    encoding = tensor.encoding
    assert encoding is not None
    if isinstance(encoding, Bitsandbytes4bit):
        batch.put(positions["number"], encoding.nested_offset or 0.0)
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


def _unpack(
    tensor: TensorInfo, places: Mapping[str, int], kernels: Kernels[int], target: int
) -> Launch:
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

    Returns the address of each part that is columns of a matrix, by role.
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

    Raises a CodecError if it names a group that there is not.
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


class Loaded(NamedTuple):
    """Tensors on the GPU, once the launches that decode and cast them are done."""

    addresses: list[int]  # where each begins, and where the last one ends; between them are zeros
    launches: list[Launch]


def load(
    batch: BatchInput,
    tensors: Sequence[TensorInfo],
    steps: Sequence[str],
    make_room: Callable[[int], int] | None = None,
) -> Loaded:
    """Reads tensors, all of which are encoded, or none; decodes them, and casts them.

    Steps are as `kernels_for_tensor` has them. `make_room` returns the address of so many bytes, a
    multiple of 64, for the result. Without it, the result is in scratch memory, or stays in the
    input if it is only read.
    """
    buffers = batch.buffers
    placed = [add_tensor(batch, tensor) for tensor in tensors]
    batch.read()
    is_encoded = tensors[0].encoding is not None
    if is_encoded:
        sizes = (aligned(bytes_of(steps[0], tensor.elements)) for tensor in tensors)
        offsets = starts(sizes)
    else:
        offsets = [places.positions["values"] for places in placed]
        offsets.append(batch.stop)
    elements = offsets[-1] * 8 // DTYPE_BITS[steps[0]]
    regions = _regions(batch, steps, elements, is_encoded, make_room)
    launches: list[Launch] = []
    if is_encoded:
        spans = zip(tensors, placed, pairwise(offsets), strict=True)
        for tensor, places, (start, stop) in spans:
            gap = -bytes_of(steps[0], tensor.elements) % 64
            if gap:  # the search for NaN looks at all of it
                buffers.stream.clear(regions[0] + stop - gap, gap)
            target = regions[0] + start
            launches.append(decode_launch(batch, tensor, places, steps[0], target))
    for step, (source, result) in zip(pairwise(steps), pairwise(regions), strict=True):
        launches.append(_cast_launch(buffers, step, source, result, elements))
    addresses = []
    for offset in offsets:
        elements_before = offset * 8 // DTYPE_BITS[steps[0]]
        addresses.append(regions[-1] + bytes_of(steps[-1], elements_before))
    return Loaded(addresses, launches)


def _regions(
    batch: BatchInput,
    steps: Sequence[str],
    elements: int,
    is_encoded: bool,
    make_room: Callable[[int], int] | None,
) -> list[int]:
    """Returns where the values are in each of the dtypes that they go through."""
    sizes = [bytes_of(tag, elements) for tag in steps]
    places: dict[int, int] = {}
    if not is_encoded:
        places[0] = batch.address(0)
    if make_room is not None:
        places[len(steps) - 1] = make_room(sizes[-1])
    others = [step for step in range(len(steps)) if step not in places]
    offsets = starts(sizes[step] for step in others)
    base = batch.buffers.scratch(offsets[-1]) if offsets[-1] else 0
    for step, offset in zip(others, offsets, strict=False):
        places[step] = base + offset
    return [places[step] for step in range(len(steps))]


def _cast_launch(
    buffers: DriverBuffers, step: tuple[str, str], source: int, result: int, elements: int
) -> Launch:
    """Returns the launch that casts values, and sets the flag if finite ones become infinite."""
    kernels = buffers.gpu.kernels[Purpose("caster", step)]
    programs = -(-elements // kernels.numbers["tile"])
    arguments = (source, result, buffers.output.address + FLAG, elements)
    return Launch(kernels.functions["cast"], programs, arguments)
