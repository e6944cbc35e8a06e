"""Leaves the sums of a program in shared memory, adds up those of a cluster, and stores them.

A thread loads eight times four sums before it stores any, so that these loads are under way
together. And without a cluster nothing waits at its barriers, which wait until all stores have
reached L2, and nothing is loaded by the way that also reaches other programs' shared memory.
"""

from typing import Any

import triton
import triton.language as tl

WAIT_FOR_CLUSTER = tl.constexpr(
    # all that was loaded has arrived, so nothing is to be ordered
    "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned; mov.b32 $0, $1;"
)


@triton.constexpr_function
def leave(shape: Any, cluster: int) -> list[str]:
    """Stores the sums of a thread in shared memory, at `tiles`, where all programs of its cluster
    find them. All products are done.
    """
    lines = [
        # now the tiles of x are not needed any more
        "bar.sync 0;",
        f"mad.lo.u32 a, t, {2 * (shape.rows + 4)}, g;",
        "mad.lo.u32 a, warp, 16, a;",
        "mad.lo.u32 a, a, 4, tiles;",
    ]
    for i in range(shape.totals):
        place = (i // 4 * 8 + i % 2) * (shape.rows + 4) + i // 2 % 2 * 8
        lines += [f"st.shared.f32 [a+{4 * place}], c{i};"]
    if cluster == 1:
        return [*lines, "bar.sync 0;"]
    lines += ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"]
    return lines


@triton.constexpr_function
def sum_assembly(cluster: int) -> str:
    """Loads four sums: adds up those of all programs of a cluster, in their order.

    Operands: $0 … $3 the sums; $4 their address.
    """
    if cluster == 1:
        return "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    lines = ["{", ".reg .b32 a;", f".reg .f32 c<{4 * cluster}>;"]
    for rank in range(cluster):
        values = ", ".join(f"c{4 * rank + i}" for i in range(4))
        lines += [
            f"mapa.shared::cluster.u32 a, $4, {rank};",
            f"ld.shared::cluster.v4.f32 {{{values}}}, [a];",
        ]
    for i in range(4):
        lines += [f"mov.f32 ${i}, c{i};"]
        lines += [f"add.rn.f32 ${i}, ${i}, c{4 * rank + i};" for rank in range(1, cluster)]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def store_assembly(dtype: tl.dtype) -> str:
    """Rounds four values and stores them.

    Operands: $0 anything; $1 … $4 the values; $5 their address, a multiple of four values; $6
    whether to.
    """
    lines = ["{", ".reg .pred p;", ".reg .b32 a, b;", "setp.ne.b32 p, $6, 0;"]
    if dtype.name == "fp32":
        lines += ["@p st.global.v4.f32 [$5], {$1, $2, $3, $4};"]
    else:
        kind = "bf16x2" if dtype.name == "bf16" else "f16x2"
        lines += [f"cvt.rn.{kind}.f32 a, $2, $1;", f"cvt.rn.{kind}.f32 b, $4, $3;"]
        lines += ["@p st.global.v2.b32 [$5], {a, b};"]
    return "\n".join([*lines, "mov.b32 $0, 0;", "}"])


@triton.jit
def store_tile(
    out_ptr,
    sums,
    thread,
    m,
    n,
    column,
    row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CLUSTER: tl.constexpr,
):
    """Adds up the sums of a cluster for a share of a tile's columns, and stores them.

    A thread does four rows of W at once. `sums` is their address in shared memory.
    """
    FOURS: tl.constexpr = ROWS // 4
    ADD: tl.constexpr = sum_assembly(CLUSTER)
    width = tl.minimum(m - column, COLUMNS)
    AT_ONCE: tl.constexpr = 8  # more have no registers
    rank = 0
    if CLUSTER > 1:  # asked for only now: no register is left to keep it in while weights multiply
        rank = tl.inline_asm_elementwise(
            "mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
    end = (rank + 1) * width // CLUSTER * FOURS
    for begin in range(rank * width // CLUSTER * FOURS, end, 2 * ROWS * AT_ONCE):
        loaded = ()
        for i in tl.static_range(AT_ONCE):
            index = begin + i * 2 * ROWS + thread
            place = tl.minimum(index // FOURS, COLUMNS - 1) * (ROWS + 4) + index % FOURS * 4
            four = tl.inline_asm_elementwise(
                ADD,
                "=&f,=&f,=&f,=&f,r",
                [sums + place * 4],
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
                _store_four(to, loaded[i], (index < end) & (to_row < n))
        else:
            for i in tl.static_range(AT_ONCE):
                index = begin + i * 2 * ROWS + thread
                to_row = index % FOURS * 4 + row
                to = out_ptr + (column + index // FOURS).to(tl.int64) * n + to_row
                for one in tl.static_range(4):
                    inside = (index < end) & (to_row + one < n)
                    tl.store(to + one, loaded[i][one].to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _store_four(to, values, inside):
    """Stores four values of each thread at a multiple of four values, if `inside`."""
    STORE: tl.constexpr = store_assembly(to.dtype.element_ty)
    tl.inline_asm_elementwise(
        STORE,
        "=r,f,f,f,f,l,r",
        values + (to.to(tl.int64), inside.to(tl.int32)),
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
