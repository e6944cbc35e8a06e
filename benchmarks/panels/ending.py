"""Leaves and stores the sums of a program: as product/panels does, but with more under way.

There, a thread loads four sums from shared memory, waits for them and stores them, then goes on to
the next four: 16 or 32 times. That took 7 to 11 % of a program's samples in the profiles of the
last GPU session (docs/kernels.md). Here it loads eight times four before it stores any. And what
only clusters need is left out without one: barriers of a cluster, which wait until all stores have
reached L2, and loads by the way that also reaches other programs' shared memory.
"""

from typing import Any

import triton
import triton.language as tl

from nf4conv.codec.kernels.product.panels.assembly import leave_sums, store_sums
from nf4conv.codec.kernels.product.panels.sums import store_assembly

AT_ONCE = tl.constexpr(8)
"""Loads of a thread that are under way together."""

WAIT_FOR_PAIR = tl.constexpr(
    # all that was loaded has arrived, so nothing is to be ordered
    "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; mov.b32 $0, $1;"
)


@triton.constexpr_function
def leave(shape: Any, cluster: int) -> list[str]:
    """Store the sums in shared memory, where all programs of a cluster find them."""
    if cluster > 1:
        lines: list[str] = leave_sums(shape)
        return lines
    return [*store_sums(shape), "bar.sync 0;"]


@triton.constexpr_function
def load_assembly(cluster: int) -> str:
    """Load four sums: of this program, or added up of those of a cluster.

    Operands: as of sum_assembly.
    """
    if cluster == 1:
        return "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    lines = ["{", ".reg .b32 a;", f".reg .f32 c<{4 * cluster}>;"]
    for part in range(cluster):
        values = ", ".join(f"c{4 * part + i}" for i in range(4))
        lines += [
            f"mapa.shared::cluster.u32 a, $4, {part};",
            f"ld.shared::cluster.v4.f32 {{{values}}}, [a];",
        ]
    for part in range(1, cluster):
        lines += [f"add.f32 c{i}, c{i}, c{4 * part + i};" for i in range(4)]
    lines += [f"mov.f32 ${i}, c{i};" for i in range(4)]
    return "\n".join([*lines, "}"])


@triton.jit
def store_tile(
    out_ptr,
    sums,
    thread,
    rank,
    cluster,
    m,
    n,
    column,
    row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    """Add up the sums of a cluster for a share of a tile's columns, and store them.

    A thread does four rows of W at once. `sums` is their address in shared memory.
    """
    FOURS: tl.constexpr = ROWS // 4
    ADD: tl.constexpr = load_assembly(CLUSTER)
    STORE: tl.constexpr = store_assembly(out_ptr.dtype.element_ty)
    width = tl.minimum(m - column, COLUMNS)
    end = (rank + 1) * width // cluster * FOURS
    for begin in range(rank * width // cluster * FOURS, end, 2 * ROWS * AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            index = begin + i * 2 * ROWS + thread
            place = tl.minimum(index // FOURS, COLUMNS - 1) * (ROWS + 4) + index % FOURS * 4
            four = tl.inline_asm_elementwise(
                ADD,
                "=&f,=&f,=&f,=&f,r,r",
                (sums + place * 4, cluster),
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
            loaded += (four,)
        if n % 4 == 0:
            for i in tl.static_range(AT_ONCE):
                index = begin + i * 2 * ROWS + thread
                to_row = index % FOURS * 4 + row
                to = out_ptr + (column + index // FOURS).to(tl.int64) * n + to_row
                inside = (index < end) & (to_row < n)
                tl.inline_asm_elementwise(
                    STORE,
                    "=r,f,f,f,f,l,r",
                    loaded[i] + (to.to(tl.int64), inside.to(tl.int32)),
                    dtype=tl.int32,
                    is_pure=False,
                    pack=1,
                )
        else:
            for i in tl.static_range(AT_ONCE):
                index = begin + i * 2 * ROWS + thread
                to_row = index % FOURS * 4 + row
                to = out_ptr + (column + index // FOURS).to(tl.int64) * n + to_row
                for one in tl.static_range(4):
                    value = loaded[i][one].to(out_ptr.dtype.element_ty)
                    tl.store(to + one, value, mask=(index < end) & (to_row + one < n))
