"""Tensor maps: describe x to the unit that copies tiles of it to shared memory.

A map is 128 bytes, which a kernel has among its arguments, so nothing is copied or kept, and a CUDA
graph holds it as it holds addresses. The driver makes one when a product is prepared. A call only
puts the address of its x into it: the first of its 16 words.
"""

import ctypes
import struct
from typing import Any, Final

import torch

from nf4conv.system.libraries import cuda_driver

MAP_WORDS: Final = 16
"""Words of 64 bits."""

_BFLOAT16: Final = 9
_FLOAT16: Final = 6
_SWIZZLE_128: Final = 3
_PROMOTE_256: Final = 3


class TensorMapError(Exception):
    """The driver made no tensor map, or one that does not begin with the address."""


def map_of(m: int, k: int, columns: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns a tensor map of x without its address: words 1 to 15, as signed numbers.

    A tile has 128 k of `columns` rows: 64 k of each row, then the other 64, in pieces of 16 bytes
    that are swizzled as `wgmma` reads them.

    Args:
        m: rows of x.
        k: columns of x, a multiple of 64.
        columns: rows of a tile, up to 256.
        dtype: of x, float16 or bfloat16.

    Raises:
        TensorMapError: the driver knows no tensor maps, refuses this one, or lays it out otherwise.
    """
    near = 1 << 20
    far = 3 << 40
    first = _encoded(near, m, k, columns, dtype)
    second = _encoded(far, m, k, columns, dtype)
    if first[0] != near or second[0] != far or first[1:] != second[1:]:
        raise TensorMapError("a tensor map does not begin with its address")
    return first[1:]


def _encoded(address: int, m: int, k: int, columns: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns a tensor map as the driver makes it: dimensions are k % 64, row, and k // 64."""
    # the driver wants it at a multiple of 64
    buffer = ctypes.create_string_buffer(8 * MAP_WORDS + 64)
    place = -(-ctypes.addressof(buffer) // 64) * 64
    kind = _BFLOAT16 if dtype == torch.bfloat16 else _FLOAT16
    sizes = (ctypes.c_uint64 * 3)(64, m, k // 64)
    strides = (ctypes.c_uint64 * 2)(2 * k, 128)  # bytes between rows, and between pieces of 64 k
    box = (ctypes.c_uint32 * 3)(64, columns, 2)
    status = _encoder()(
        ctypes.c_void_p(place),
        ctypes.c_int(kind),
        ctypes.c_uint32(3),
        ctypes.c_void_p(address),
        sizes,
        strides,
        box,
        (ctypes.c_uint32 * 3)(1, 1, 1),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE_128),
        ctypes.c_int(_PROMOTE_256),
        ctypes.c_int(0),  # zeros behind the last row, and behind the last k
    )
    if status != 0:
        raise TensorMapError(f"cuTensorMapEncodeTiled returned {status}")
    return struct.unpack(f"<{MAP_WORDS}q", ctypes.string_at(place, 8 * MAP_WORDS))


def _encoder() -> Any:
    """Returns what the driver makes tensor maps with."""
    try:
        return cuda_driver().cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise TensorMapError(f"the driver makes no tensor maps: {error}") from error
