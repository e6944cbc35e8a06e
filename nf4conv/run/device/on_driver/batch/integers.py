"""Packed integers decoded on the GPU: the kernels that it takes, and their launches.

GPTQ and AWQ store a weight by its columns. A piece of it, some of its rows, is a run in each line
of its tensors. So these are brought to the GPU as they are, and stay there until all pieces are
taken.
"""

from array import array
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from nf4conv.errors import CodecError
from nf4conv.format.dtypes import DTYPE_BITS
from nf4conv.run.device.on_driver.batch.buffers import Launch
from nf4conv.run.device.on_driver.batch.input import BatchInput
from nf4conv.run.device.on_driver.kernels import Action, Kernels, Purpose
from nf4conv.sources.encodings.types.arranged import Columns
from nf4conv.sources.encodings.types.integers import HalfQuadratic, PackedIntegers
from nf4conv.sources.tensors import TensorInfo


def integers_purpose(encoding: PackedIntegers, tag: str) -> Purpose:
    """Tells which kernels decode packed integers to the dtype of a tag."""
    zeros = None if encoding.zeros is None else encoding.zeros.dtype
    index = None if encoding.group_index is None else encoding.group_index.dtype
    layout = (encoding.packing, encoding.bits)
    stored = (zeros, encoding.zeros_less_one, index, encoding.is_signed)
    return Purpose(Action.DECODE_INTEGERS, (tag, encoding.scale.dtype, *layout, *stored))


def halves_purpose(encoding: HalfQuadratic, tag: str) -> Purpose:
    """Tells which kernels decode a weight of HQQ to the dtype of a tag."""
    details = (tag, encoding.scales.dtype, encoding.bits, encoding.axis)
    return Purpose(Action.DECODE_HALVES, details)


def keep_matrices(batch: BatchInput, tensor: TensorInfo) -> dict[str, int]:
    """Brings what a piece of a weight is cut out of to the GPU, unless it is there.

    Returns:
        The address of each part that is columns of a matrix, by role.
    """
    found: dict[str, Columns] = {}
    encoding = tensor.encoding
    if isinstance(encoding, PackedIntegers):
        for role, part in encoding.parts:
            if isinstance(part.encoding, Columns):
                found[role] = part.encoding
    if not found:
        return {}
    addresses = batch.keep(tuple(columns.values.file_range for columns in found.values()))
    places = {}
    for (role, columns), address in zip(found.items(), addresses, strict=True):
        places[role] = address + columns.first * DTYPE_BITS[columns.values.dtype] // 8
    return places


def check_group_index(
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
    in_order = _groups_in_order(encoding.columns, encoding.group_size, letter)
    if bytes(raw) == in_order or part.file_range == batch.buffers.checked:
        return
    groups = encoding.scale.shape[0]
    if encoding.packing == "compressed-tensors":
        groups = encoding.scale.elements // tensor.shape[0]
    index = raw.cast(letter)
    least = min(index)
    if encoding.packing == "compressed-tensors" and least == -1:
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


def decode_integers(
    tensor: TensorInfo,
    encoding: PackedIntegers,
    places: Mapping[str, int],
    kernels: Kernels[int],
    target: int,
) -> Launch:
    """Returns the launch that decodes packed integers, given the addresses of their parts."""
    rows, columns = tensor.shape
    tiles_of_row = -(-columns // kernels.numbers["columns"])
    programs = -(-rows // kernels.numbers["rows"]) * tiles_of_row
    values = places["values"]  # without zero points or an index, the kernel does not read them
    addresses = (
        values,
        places["scale"],
        places.get("zeros", values),
        places.get("group_index", values),
        target,
    )
    zeros = encoding.zeros or encoding.values
    lines = (_line(encoding.values), _line(encoding.scale), _line(zeros))
    arguments = (*addresses, rows, columns, tiles_of_row, *lines, encoding.group_size)
    return Launch(kernels.functions["decode"], programs, arguments)


def _line(part: TensorInfo) -> int:
    """Returns how many elements it is from one line of a part to the next."""
    if isinstance(part.encoding, Columns):
        part = part.encoding.values
    return part.shape[1] if len(part.shape) == 2 else 1


def decode_halves(
    encoding: HalfQuadratic, places: Mapping[str, int], kernels: Kernels[int], target: int
) -> Launch:
    """Returns the launch that decodes a weight of HQQ, given the addresses of its parts."""
    values = places["values"]
    after = places.get("after", values)  # not read unless the run of elements goes on
    distance = encoding.group_size if encoding.axis == 1 else encoding.scales.elements
    arguments = (
        values,
        after,
        places["scale"],
        places["zero"],
        target,
        encoding.elements,
        encoding.first,
        encoding.words.elements,
        encoding.first_word,
        distance,
        encoding.first_group,
    )
    programs = -(-encoding.elements // kernels.numbers["tile"])
    name = "across" if "after" in places else "within"
    return Launch(kernels.functions[name], programs, arguments)
