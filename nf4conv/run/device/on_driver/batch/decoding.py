"""Encoded tensors decoded on the GPU: the kernels that it takes, and their launches."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Final, NamedTuple

from nf4conv.format.dtypes import DTYPE_NAMES
from nf4conv.run.device.on_driver.batch.buffers import Launch
from nf4conv.run.device.on_driver.batch.ggml import decode_ggml, ggml_purpose
from nf4conv.run.device.on_driver.batch.input import BatchInput
from nf4conv.run.device.on_driver.batch.integers import (
    check_group_index,
    decode_halves,
    decode_integers,
    halves_purpose,
    integers_purpose,
    keep_matrices,
)
from nf4conv.run.device.on_driver.kernels import Action, Kernels, Purpose
from nf4conv.sources.encodings.types.bitsandbytes import Bitsandbytes4bit, packed_in_order
from nf4conv.sources.encodings.types.gguf import GgufBlocks
from nf4conv.sources.encodings.types.integers import HalfQuadratic, PackedIntegers
from nf4conv.sources.encodings.types.scaled import Bitsandbytes8bit, Fp4, Scaled
from nf4conv.sources.tensors import TensorInfo

_SCALE_TAGS: Final = ("F32", "F16", "BF16", "U8", "F8_E8M0")

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
        found.add(Purpose(Action.CAST, step))
    return frozenset(found)


def _decoding_purpose(tensor: TensorInfo, tag: str) -> Purpose | None:
    """Tells which kernels decode a tensor to the dtype of a tag; None if there are none."""
    encoding = tensor.encoding
    if encoding is None or tag not in DTYPE_NAMES or tensor.elements == 0:
        return None
    match encoding:
        case Scaled(zero=TensorInfo()) | Bitsandbytes8bit(is_transposed=True):
            return None
        case Scaled() | Bitsandbytes8bit():
            return _scaled_purpose(encoding, tag)
        case Fp4() if len(encoding.values.shape) == 2:
            return _fp4_purpose(encoding, tag)
        case PackedIntegers() if encoding.has_kernel and not encoding.is_transposed:
            return integers_purpose(encoding, tag)
        case HalfQuadratic() if encoding.words.elements < 2**31:
            return halves_purpose(encoding, tag)
        case GgufBlocks():
            return ggml_purpose(encoding, tag)
        case Bitsandbytes4bit() if encoding.has_plain_state and not encoding.is_transposed:
            return _unpacking_purpose(encoding, tag)
        case _:
            return None


def _unpacking_purpose(encoding: Bitsandbytes4bit, tag: str) -> Purpose:
    details = (DTYPE_NAMES[tag], encoding.quant_type, encoding.blocksize)
    return Purpose(Action.UNPACK, details)


def _scaled_purpose(encoding: Scaled | Bitsandbytes8bit, tag: str) -> Purpose | None:
    values = encoding.values
    scale_tag = "F32" if encoding.scale is None else encoding.scale.dtype
    if len(values.shape) != 2 or scale_tag not in _SCALE_TAGS:
        return None
    block = (1, 1)
    if isinstance(encoding, Scaled) and encoding.block is not None:
        block = encoding.block
    by_127 = isinstance(encoding, Bitsandbytes8bit)
    is_aligned = values.shape[1] % 16 == 0
    details = (tag, values.dtype, scale_tag, block, by_127, is_aligned)
    return Purpose(Action.DECODE_SCALED, details)


def _fp4_purpose(encoding: Fp4, tag: str) -> Purpose:
    pairs = encoding.values.shape[1]
    group = pairs // encoding.scale.shape[1]
    divisor = None if encoding.divisor is None else encoding.divisor.dtype
    multiplier = None if encoding.multiplier is None else encoding.multiplier.dtype
    layout = (pairs % 16 == 0, encoding.is_transposed)
    details = (tag, encoding.scale.dtype, group, divisor, multiplier, *layout)
    return Purpose(Action.DECODE_FP4, details)


def add_tensor(batch: BatchInput, tensor: TensorInfo) -> Places:
    """Adds all that is needed of a tensor, or a piece of it; returns where its parts will be."""
    if tensor.encoding is None:
        return Places({"values": batch.add(tensor.file_range)})
    # the kernels have bitsandbytes' code map, and what its quant state says is known
    unread: tuple[str, ...] = ()
    packed = packed_in_order(tensor)
    if packed is not None:
        unread = ("quant_map", packed.quant_state_role)
    places = Places({}, keep_matrices(batch, tensor))
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
    if isinstance(encoding, Bitsandbytes4bit):
        batch.put(positions["number"], encoding.nested_offset)
        return _unpack(tensor, places, kernels, target)
    if isinstance(encoding, Fp4):
        return _decode_fp4(encoding, places, kernels, target)
    if isinstance(encoding, PackedIntegers):
        if encoding.group_index is not None:
            check_group_index(batch, tensor, encoding, positions["group_index"])
        return decode_integers(tensor, encoding, {**places, **placed.kept}, kernels, target)
    if isinstance(encoding, HalfQuadratic):
        return decode_halves(encoding, places, kernels, target)
    if isinstance(encoding, GgufBlocks):
        return decode_ggml(encoding, places, kernels, target)
    assert isinstance(encoding, Scaled | Bitsandbytes8bit)
    batch.put(positions["number"], 1.0)
    return _decode_scaled(encoding, places, kernels, target)


def _decode_scaled(
    encoding: Scaled | Bitsandbytes8bit, places: _Addresses, kernels: Kernels[int], target: int
) -> Launch:
    scale = places.get("scale", places["number"])
    addresses = (places["values"], scale, target)
    return _decode(kernels, encoding.values, addresses, _steps_of_scales(encoding.scale))


def _decode_fp4(encoding: Fp4, places: _Addresses, kernels: Kernels[int], target: int) -> Launch:
    scale = places["scale"]
    divisor = places.get("divisor", scale)  # without one, the kernel does not read it
    multiplier = places.get("multiplier", scale)
    addresses = (places["values"], scale, divisor, multiplier, target)
    return _decode(kernels, encoding.values, addresses, (encoding.scale.shape[1],))


def _decode(
    kernels: Kernels[int], values: TensorInfo, addresses: Sequence[int], steps: Sequence[int]
) -> Launch:
    """Returns the launch that decodes a matrix of 8-bit values, or of pairs of 4-bit values."""
    rows, columns = values.shape
    tiles_of_row = -(-columns // kernels.numbers["columns"])
    programs = -(-rows // kernels.numbers["rows"]) * tiles_of_row
    arguments = (*addresses, rows, columns, tiles_of_row, *steps)
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


def _steps_of_scales(scale: TensorInfo | None) -> tuple[int, int]:
    """Returns how far it is from the scale of one row, and one column, to the next.

    A step is 0 where one scale serves all. A single dimension of scales is that of rows.
    """
    if scale is None or scale.elements == 1:
        return 0, 0
    height, width = scale.shape if len(scale.shape) == 2 else (scale.elements, 1)
    row_step = 0 if height == 1 else width
    column_step = 0 if width == 1 else 1
    return row_step, column_step
