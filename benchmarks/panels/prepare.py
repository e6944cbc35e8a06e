"""Prepares products by candidates, as product/panels prepares its own."""

from typing import Final

import torch

from benchmarks.panels.compiling import TYPES
from benchmarks.panels.costs import SCALED, STREAMS, Candidate, Way, programs_at_once
from benchmarks.panels.kernels import candidate_kernel
from benchmarks.panels.maps import MAP_WORDS, map_of
from benchmarks.panels.streaming import stream_kernel
from nf4conv.codec.kernels.launch import Launcher
from nf4conv.codec.kernels.product.launches import Product, readable, stream_of
from nf4conv.codec.kernels.product.panels.kernels import TILE, launch_arrange
from nf4conv.codec.kernels.product.panels.prepare import prepare_panel
from nf4conv.codec.kernels.product.sums import prepare_sum
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table, value_table
from nf4conv.codec.quant_state import Addresses, Form

launch_candidate = Launcher(candidate_kernel)

launch_stream = Launcher(stream_kernel)


ALONE: Final = 118_000
"""Bytes of shared memory of which a multiprocessor has no second."""


def prepare(
    candidate: Candidate,
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    n: int,
    form: Form,
) -> Product:
    """Prepares to multiply all x of one shape with all weights of one shape; see prepare_panel."""
    if candidate.way == "ordered":
        return prepare_panel(x_shape, dtype, device, n, form, candidate.plan)
    if candidate.way in STREAMS:
        return _prepare_stream(candidate, x_shape, dtype, device, n, form)
    straight = candidate.way != "brisk"
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    panel, cluster, splits = candidate.plan
    if not form.nested:
        panel = panel.plain
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    clusters = -(-m // panel.columns) * -(-n // panel.rows) * splits
    table, norm = _table(candidate.way, dtype, device, form)
    shift = (form.blocksize // 64).bit_length() - 1
    x_map = map_of(m, k, panel.columns, dtype) if straight else (0,) * (MAP_WORDS - 1)
    behind = (*x_map, table, m, n, k, cluster, splits, shift, norm)
    types = (torch.uint8 if form.nested else torch.float32, *(torch.float32,) * 3)
    target_dtype = torch.float32 if splits > 1 else dtype
    launch = launch_candidate.prepare(
        device,
        (target_dtype, torch.uint8, *types, 0, *x_map, torch.int32, *behind[MAP_WORDS:]),
        (panel, TYPES[dtype], cluster, candidate.way),
        (dtype, splits > 1),
        num_warps=4 * panel.groups,
        registers=candidate.registers,
        begins_early=True,
        shared_bytes=_shared_bytes(candidate, clusters * cluster, processors),
        cluster=cluster,
    )
    words = 0 if straight else -(-m // panel.columns) * -(-k // 128) * panel.columns * 64
    arrange = launch_arrange.prepare(
        device, (dtype, dtype, m, k), (panel.columns, TILE), dtype, num_warps=4, begins_early=True
    )
    add = prepare_sum(device, dtype, splits, early=True) if splits > 1 else None
    space = 2 * words + (2 * splits * m * n if splits > 1 else 0)  # 16-bit elements
    current_stream = stream_of(device)

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        stream = current_stream()
        address = x.data_ptr()
        target = out.data_ptr()
        if space > 0:
            room = x.new_empty(space)
            if splits > 1:
                target = room.data_ptr() + 4 * words
            if not straight:
                arrange(words // TILE, stream, address, room.data_ptr(), m, k)
                address = room.data_ptr()
        launch(clusters, stream, target, *weight, address, *behind)
        if add is not None:
            add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply


def _shared_bytes(candidate: Candidate, programs: int, processors: int) -> int:
    """Returns the bytes of shared memory that a program asks for.

    Where sums of splits are added up behind them, programs of the next product begin on
    multiprocessors where others still run: two might share one while others have none.
    """
    least = candidate.plan.panel.shared_bytes
    if candidate.plan.splits > 1 and programs <= processors:
        return max(least, ALONE)
    return least


def _prepare_stream(
    candidate: Candidate,
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    n: int,
    form: Form,
) -> Product:
    """Prepares to multiply by programs that share all turns. Two streams must not share a product:
    its flags are its own.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    panel = candidate.plan.panel
    if not form.nested:
        panel = panel.plain
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    all_turns = -(-m // panel.columns) * -(-n // panel.rows) * -(-k // 128)
    # a program without turns would leave nothing, and others would wait for it
    programs = min(processors * programs_at_once(candidate), all_turns)
    table, norm = _table(candidate.way, dtype, device, form)
    shift = (form.blocksize // 64).bit_length() - 1
    x_map = map_of(m, k, panel.columns, dtype)
    flags = torch.zeros(programs, dtype=torch.int32, device=device)
    types = (torch.uint8 if form.nested else torch.float32, *(torch.float32,) * 3)
    behind = (m, n, k, shift, norm)
    launch = launch_stream.prepare(
        device,
        (dtype, torch.uint8, *types, 0, *x_map, torch.int32, torch.float32, torch.int32, *behind),
        (panel, TYPES[dtype], candidate.way == "shared"),
        dtype,
        num_warps=4 * panel.groups,
        registers=candidate.registers,
        begins_early=True,
        shared_bytes=panel.shared_bytes,
    )
    size = 2 * programs * panel.rows * panel.columns  # float32, in 16-bit elements
    current_stream = stream_of(device)

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        left = x.new_empty(size).data_ptr()
        target, address = out.data_ptr(), x.data_ptr()
        tables = (table, left, flags.data_ptr())
        launch(programs, current_stream(), target, *weight, address, *x_map, *tables, *behind)
        return out

    return multiply


def _table(way: Way, dtype: torch.dtype, device: torch.device, form: Form) -> tuple[int, float]:
    """Returns the address of the table for x of a dtype, and what scales are multiplied with."""
    if dtype == torch.float16 and way not in SCALED:
        return value_table(form.quant_type, device).data_ptr(), 1.0
    values = dtype if way in SCALED else torch.float16
    table = pair_table(form.quant_type, values, device)
    return table.data_ptr(), 1 / MULTIPLES[form.quant_type, values]
