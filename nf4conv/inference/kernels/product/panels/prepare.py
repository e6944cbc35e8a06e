"""Prepares products by panels: what a call needs is found once."""

import ctypes
import struct
from typing import Final

import torch
import triton.language as tl

from nf4conv.codec.kernels.internals import CannotLaunchError, stream_of
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table, value_table
from nf4conv.codec.quant_state import Addresses, Form
from nf4conv.inference.kernels.product.launches import (
    Product,
    block_shift_of,
    readable,
    types_of_weight,
)
from nf4conv.inference.kernels.product.panels.kernels import launch_panel
from nf4conv.inference.kernels.product.panels.plans import Panel, Plan, choose_plan, without_nesting
from nf4conv.inference.kernels.product.sums import prepare_sum
from nf4conv.system.machine import cuda_driver

TYPES: Final = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def prepare_panel(
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    n: int,
    form: Form,
    chosen: Plan | None = None,
) -> Product:
    """Prepares to multiply all x of one shape with all weights of one shape and form, as
    launches.prepare_product does, on a GPU with `wgmma`. `chosen` is `choose_plan`'s by default.

    Raises CannotLaunchError if the driver makes no tensor map of x.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    panel, cluster, splits = chosen or choose_plan(m, n, k, processors)
    if not form.nested:
        panel = without_nesting(panel)
    x_map = map_of(m, k, panel.columns, dtype)
    table, norm = table_for(panel, dtype, device, form.quant_type)
    behind = (table.data_ptr(), m, n, k, splits, block_shift_of(form), norm)
    words = (1 << 40,) * MAP_WORDS  # of 64 bits
    launch = launch_panel.prepare(
        device,
        (*types_of_weight(dtype, form, splits > 1), words, torch.int32, *behind[1:]),
        (panel, TYPES[dtype], cluster),
        splits > 1,
        4 * panel.groups,
        registers=panel.registers,
        begins_early=True,
        shared_bytes=panel.shared_bytes,
        cluster=cluster,
    )
    clusters = -(-m // panel.columns) * -(-n // panel.rows) * splits
    current_stream = stream_of(device)
    add = prepare_sum(device, dtype, splits, early=True) if splits > 1 else None
    parts_size = 2 * splits * m * n  # float32, in 16-bit elements

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        stream = current_stream()
        if add is None:
            launch(clusters, stream, out.data_ptr(), weight, (x.data_ptr(), *x_map), *behind)
            return out
        parts = x.new_empty(parts_size)
        target = parts.data_ptr()
        launch(clusters, stream, target, weight, (x.data_ptr(), *x_map), *behind)
        add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply


def table_for(
    panel: Panel, dtype: torch.dtype, device: torch.device, quant_type: str
) -> tuple[torch.Tensor, float]:
    """Returns the table that a panel reads, and what its values are multiplied with."""
    if dtype == torch.float16 and not panel.scales_sums:
        return value_table(quant_type, device), 1.0
    values = dtype if panel.scales_sums else torch.float16
    return pair_table(quant_type, values, device), 1 / MULTIPLES[quant_type, values]


MAP_WORDS: Final = 16
"""Words of a tensor map, of 64 bits. It describes x to the unit that copies tiles of it to shared
memory. A kernel has it among its arguments, so nothing is copied or kept, and a CUDA graph holds it
as it holds addresses. The driver makes one when a product is prepared; a call only puts the address
of its x into the first word.
"""

_BFLOAT16: Final = 9
_FLOAT16: Final = 6
_SWIZZLE_128: Final = 3
_PROMOTE_256: Final = 3


def map_of(m: int, k: int, columns: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns a tensor map of x, [m, k], without its address: words 1 to 15, as signed numbers.

    A tile has 128 k of up to 256 `columns`, rows of x: 64 k of each row, then the other 64, in
    pieces of 16 bytes that are swizzled as `wgmma` reads them.

    Raises CannotLaunchError if the driver knows no tensor maps, refuses this one, or lays it out
    otherwise.
    """
    try:
        encode = cuda_driver().cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise CannotLaunchError(f"the driver makes no tensor maps: {error}") from error
    # the driver wants it at a multiple of 64
    buffer = ctypes.create_string_buffer(8 * MAP_WORDS + 64)
    place = -(-ctypes.addressof(buffer) // 64) * 64
    kind = _BFLOAT16 if dtype == torch.bfloat16 else _FLOAT16
    address = (3 << 40) + (1 << 20)  # any
    # dimensions are k % 64, row, and k // 64
    sizes = (ctypes.c_uint64 * 3)(64, m, k // 64)
    strides = (ctypes.c_uint64 * 2)(2 * k, 128)  # bytes between rows, and between pieces of 64 k
    box = (ctypes.c_uint32 * 3)(64, columns, 2)
    status = encode(
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
        raise CannotLaunchError(f"cuTensorMapEncodeTiled returned {status}")
    first, *others = struct.unpack(f"<{MAP_WORDS}q", ctypes.string_at(place, 8 * MAP_WORDS))
    if first != address:
        raise CannotLaunchError("a tensor map does not begin with its address")
    return tuple(others)
