"""Prepares products by panels: what a call needs is found once."""

import torch

from nf4conv.codec.kernels.product.launches import Product, readable, stream_of
from nf4conv.codec.kernels.product.panels.kernels import TILE, launch_arrange, launch_panel
from nf4conv.codec.kernels.product.panels.plans import Plan, choose_plan
from nf4conv.codec.kernels.product.sums import prepare_sum
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table, value_table
from nf4conv.codec.quant_state import Addresses, Form


def prepare_panel(
    x_shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    n: int,
    form: Form,
    chosen: Plan | None = None,
) -> Product:
    """Prepares to multiply all x of one shape with all weights of one shape.

    Args:
        x_shape: [..., k]. k is a multiple of 64.
        dtype: of x, float16 or bfloat16.
        device: a GPU with `wgmma`.
        n: rows of the weights; n · k is below launches.MOST_ELEMENTS.
        form: of the weights; the blocksize is a multiple of 64, the packed codes begin at a
            multiple of 16 bytes.
        chosen: by default `choose_plan`'s.

    Returns:
        A function of x and a weight that returns x · Wᵀ, [..., n] of the dtype of x.
    """
    k = x_shape[-1]
    m = x_shape.numel() // k
    out_shape = (*x_shape[:-1], n)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    panel, cluster, splits = chosen or choose_plan(m, n, k, processors)
    if not form.nested:
        panel = panel.plain
    turns = -(-k // 128)
    column_tiles = -(-m // panel.columns)
    clusters = column_tiles * -(-n // panel.rows) * splits
    in_pairs = dtype == torch.bfloat16
    norm = 1.0
    if in_pairs:
        table = pair_table(form.quant_type, torch.float16, device)
        norm /= MULTIPLES[form.quant_type, torch.float16]
    else:
        table = value_table(form.quant_type, device)
    shift = (form.blocksize // 64).bit_length() - 1
    behind = (table.data_ptr(), m, n, k, cluster, splits, shift, norm)
    absmax = torch.uint8 if form.nested else torch.float32
    others = torch.float32
    target_dtype = torch.float32 if splits > 1 else dtype
    pointers = (dtype, target_dtype, torch.uint8, absmax, others, others, others, torch.int32)
    launch = launch_panel.prepare(
        device,
        (*pointers, *behind[1:]),
        (panel,),
        (dtype, splits > 1),
        num_warps=4 * panel.groups,
        registers=panel.registers,
        begins_early=True,
        shared_bytes=panel.shared_bytes,
        cluster=cluster,
    )
    arrange = launch_arrange.prepare(
        device, (dtype, dtype, m, k), (panel.columns, TILE), dtype, num_warps=4, begins_early=True
    )
    words = column_tiles * turns * panel.columns * 64  # of x in tiles, 32 bits each
    space = 2 * words  # 16-bit elements: x in tiles, and the splits in float32 behind it
    add = None
    if splits > 1:
        space += 2 * splits * m * n
        add = prepare_sum(device, dtype, splits, early=True)
    current_stream = stream_of(device)

    def multiply(x: torch.Tensor, weight: Addresses) -> torch.Tensor:
        x = readable(x)
        out = x.new_empty(out_shape)
        arranged = x.new_empty(space)
        address = arranged.data_ptr()
        target = out.data_ptr() if splits == 1 else address + 4 * words
        stream = current_stream()
        arrange(words // TILE, stream, x.data_ptr(), address, m, k)
        launch(clusters, stream, address, target, *weight, *behind)
        if add is not None:
            add(stream, target, out.data_ptr(), m * n)
        return out

    return multiply
