"""x · Wᵀ with a packed weight and one to four rows of x: every code is decoded once, in registers.

A program takes *units* of rows of W, one after the other, and a unit in *stages*; codes and scales of the next stage
are on their way. Weights are the left operand of a tensor core's product. The sums over 64 k are multiplied with the
scale of their block in float32, which no weight is, so two blocks must not meet in one sum. A lane loads 16 bytes, half
a block, and four lanes two blocks of a row. x is given in two columns, in either with zeros for the other block; the
columns that are left hold another range of k. All warps share the rows, and meet when the sums are complete.

Tensors have one element for each thread of a program, so an asm statement is the code of one thread. A lane (g, t)
holds four *slots*, rows of W that are 8 / RANGES apart. tests/emulator.py runs what this compiles to.
"""

from collections.abc import Callable
from typing import Final

import torch
import triton
import triton.language as tl

import nf4conv.codec.kernels.product_assembly as text
from nf4conv.codec.kernels.arithmetic import multiply
from nf4conv.codec.kernels.launch import Launcher
from nf4conv.codec.kernels.tables import MULTIPLES, pair_table
from nf4conv.codec.quant_state import Decoding

CAPABILITY: Final = 9  # of GPUs that begin kernels early; the kernel was measured on no other
MOST_ROWS: Final = 4  # of x; the crossover with decoding and the library's product is in docs/kernels.md
MOST_ELEMENTS: Final = 1 << 34  # of a weight: its pieces of 8 bytes and blocks of 64 elements are counted in 32 bits
THREADS = tl.constexpr(256)


def prepare_product(
    m: int, n: int, k: int, packed: torch.Tensor, decoding: Decoding, dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """What multiplies m rows of x with a weight; to be called again, since it takes as long as a launch to make it.

    It is a function of x, [m, k] of `dtype`, 16 bits, and out, [m, n], which is written; contiguous. At most MOST_ROWS,
    n * k below MOST_ELEMENTS, k and blocksize multiples of 64, x and packed, [n * k / 2], at multiples of 16 bytes.
    """
    programs = 2 * torch.cuda.get_device_properties(packed.device).multi_processor_count
    ranges, sizes = plan(m, n, k)
    weight = packed, *decoding.pointers(), pair_table(decoding.quant_type, dtype, packed.device)
    scaling = (decoding.blocksize // 64).bit_length() - 1, 1 / MULTIPLES[decoding.quant_type, dtype]
    options = (ranges, decoding.state2 is not None), dtype, 8, 128, True

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        launch_product(min(sizes[4], programs), (x, *weight, out, *sizes, *scaling), *options)

    return run


def plan(m: int, n: int, k: int) -> tuple[int, tuple[int, ...]]:
    """RANGES, and (m, n, k, steps, units) of product_kernel."""
    ranges = 2 if m <= 2 else 1
    return ranges, (m, n, k, -(-k // (1024 * ranges)), -(-n * ranges // 32))


# fmt: off
@triton.jit(
    do_not_specialize=["m", "n", "k", "steps", "units", "block_shift", "norm"],
    do_not_specialize_on_alignment=[
        "x_ptr", "packed_ptr", "absmax_ptr", "code_ptr", "nested_absmax_ptr", "offset_ptr", "pair_ptr", "out_ptr"
    ],
)
def product_kernel(
    x_ptr, packed_ptr, absmax_ptr, code_ptr, nested_absmax_ptr, offset_ptr, pair_ptr, out_ptr,
    m: tl.int32, n: tl.int32, k: tl.int32, steps: tl.int32, units: tl.int32, block_shift: tl.int32, norm: tl.float32,
    RANGES: tl.constexpr, NESTED: tl.constexpr,
):
    # fmt: on
    """Compute units program_id, program_id + programs, … of `steps` stages each, times norm.

    A block has 64 << block_shift elements. x_ptr: [m, k] float16 or bfloat16. packed_ptr: [n, k / 2] uint8.
    absmax_ptr … offset_ptr: Decoding.pointers(). pair_ptr: tables.pair_table. out_ptr: [m, n], written.
    RANGES: of k that a warp works on at once, 2 for up to two rows of x, or 1.
    """
    thread = tl.arange(0, THREADS)
    unit = tl.program_id(0)
    programs = tl.num_programs(0)
    weight = (packed_ptr, absmax_ptr, nested_absmax_ptr, n, k, block_shift)
    fill: tl.constexpr = text.fill_assembly(NESTED)
    _prefetch(packed_ptr, unit, n, k, thread, RANGES)
    # everything that follows depends on this one, which waits for the kernel before
    thread = _asm(fill, "r", "llr", (pair_ptr.to(tl.int64), code_ptr.to(tl.int64), thread))[0]
    offset = tl.load(offset_ptr) if NESTED else 0.0
    ahead = _load_stage(weight, unit, 0, thread, RANGES, NESTED)
    totals = (tl.zeros(thread.shape, tl.float32),) + (tl.zeros(thread.shape, tl.float32),)
    totals = totals + totals
    step = 0
    parity = 0
    for _ in range((units - unit + programs - 1) // programs * steps):
        current = ahead
        first = _first_k(step, thread, RANGES)
        done = step == steps - 1
        next_unit = tl.where(done, unit + programs, unit)
        next_step = tl.where(done, 0, step + 1)
        ahead = _load_stage(weight, next_unit, next_step, thread, RANGES, NESTED)
        operands = current[:16] + _scales(current, offset, NESTED) + (thread % 32 * 0x04040404,)
        totals = _add_stage(totals, operands, x_ptr, pair_ptr, m, k, first, thread, RANGES)
        if done:
            _finish(totals, out_ptr, m, n, norm, unit, parity, thread, RANGES)
        kept = ()
        for i in tl.static_range(4):
            kept = kept + (tl.where(done, 0.0, totals[i]),)
        totals = kept
        parity = tl.where(done, 1 - parity, parity)
        unit = next_unit
        step = next_step


launch_product = Launcher(product_kernel)


@triton.jit
def _asm(TEXT: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, operands):
    """The tuple that a statement returns; operands by letter: f float32, r int32, l int64."""
    kinds: tl.constexpr = text.kinds(OUTPUTS)
    return tl.inline_asm_elementwise(TEXT, text.letters(OUTPUTS, INPUTS), operands, dtype=kinds, is_pure=False, pack=1)


@triton.jit
def _first_k(step, thread, RANGES: tl.constexpr):
    """[threads] int32: the first k of each lane's stage."""
    return step * (THREADS * 4 * RANGES) + thread // 32 * (128 * RANGES) + thread // 4 % RANGES * 128


@triton.jit
def _rows(unit, thread, n, RANGES: tl.constexpr):
    """[threads] int32: the rows of W in a lane's slots; behind the last one it again, whose sums are not stored."""
    APART: tl.constexpr = 8 // RANGES
    row = unit * (4 * APART) + thread // 4 % 8 // RANGES
    rows = ()
    for slot in tl.static_range(4):
        rows = rows + (tl.minimum(row + slot * APART, n - 1),)
    return rows


@triton.jit
def _prefetch(packed_ptr, unit, n, k, thread, RANGES: tl.constexpr):
    """Bring words of the first stage to L2, where they stay up to date, while the kernel before may still run."""
    first = tl.minimum(_first_k(0, thread, RANGES) + thread % 4 * 32, k - 1)
    rows = _rows(unit, thread, n, RANGES)
    for slot in tl.static_range(4):
        address = packed_ptr.to(tl.int64) + (rows[slot].to(tl.int64) * k + first) // 2
        _asm("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "r", "l", (address,))


@triton.jit
def _load_stage(weight, unit, step, thread, RANGES: tl.constexpr, NESTED: tl.constexpr):
    """A stage as it is stored: four words of each slot; then what a lane loads of absmax, and of nested absmax.

    A quad needs two scales of each slot; lane t loads those of index t and t + 4 for all four. Behind the last k the
    last ones are read again: there x is 0.
    """
    packed_ptr, absmax_ptr, nested_absmax_ptr, n, k, block_shift = weight
    read: tl.constexpr = text.READ
    t = thread % 4
    first = _first_k(step, thread, RANGES)
    rows = _rows(unit, thread, n, RANGES)
    words = ()
    for slot in tl.static_range(4):
        piece = rows[slot] * (k >> 4) + (tl.minimum(first + t * 32, k - 32) >> 4)  # of 8 bytes
        words = words + _asm(read, "rrrr", "lr", (packed_ptr.to(tl.int64), piece))
    codes = ()
    nested = ()
    for i in tl.static_range(2):
        row = tl.where(t < 2, rows[2 * i], rows[2 * i + 1])
        block = (row * (k >> 6) + (tl.minimum(first + t % 2 * 64, k - 64) >> 6)) >> block_shift
        codes = codes + (tl.load(absmax_ptr + block),)
        nested = nested + (tl.load(nested_absmax_ptr + (block >> 8)) if NESTED else block,)
    return words + codes + nested


@triton.jit
def _scales(stage, offset, NESTED: tl.constexpr):
    """The absmax of a stage, decoded."""
    read: tl.constexpr = "{ .reg .b32 a; mov.u32 a, codes; mad.lo.u32 a, $1, 4, a; ld.shared.f32 $0, [a]; }"
    out = ()
    for i in tl.static_range(16, 18):
        scale = stage[i]
        if NESTED:
            scale = multiply(_asm(read, "f", "r", (scale.to(tl.int32),))[0], stage[i + 2], True) + offset
        out = out + (scale,)
    return out


@triton.jit
def _add_stage(totals, operands, x_ptr, pair_ptr, m, k, first, thread, RANGES: tl.constexpr):
    """Add a stage to the totals of the slots.

    Column 2 * (RANGES * row of x + range) + block: a lane (g, t) gives x to column g, and finds the sums of row of x
    t // RANGES and range t % RANGES; they are meant for it if its rows are of that range.
    """
    g = thread // 4 % 8
    t = thread % 4
    row = g // 2 // RANGES
    at = first + (g // 2 % RANGES - g % RANGES) * 128 + t * 32
    given = (g % 2 == t // 2) & (row < m) & (at < k)
    zeros = pair_ptr.to(tl.int64) + 1024
    address = tl.where(given, x_ptr.to(tl.int64) + (row.to(tl.int64) * k + at) * 2, zeros)
    add: tl.constexpr = text.stage_assembly(x_ptr.dtype.element_ty)
    return _asm(add, "ffff", "ffff" + "r" * 16 + "ffrl", totals + operands + (address,))


@triton.jit
def _finish(totals, out_ptr, m, n, norm, unit, parity, thread, RANGES: tl.constexpr):
    """Store the sums of all ranges and warps, by thread 4 * (columns * row + column) + slot."""
    COLUMNS: tl.constexpr = 4 // RANGES
    COUNT: tl.constexpr = 32 * COLUMNS // RANGES
    g = thread // 4 % 8
    t = thread % 4
    place = (g // RANGES * COLUMNS + t // RANGES) * 16 + (thread // 32 * RANGES + g % RANGES) * (4 * COUNT)
    add: tl.constexpr = text.gather_assembly(THREADS // 32 * RANGES, COUNT)
    meant = (g % RANGES == t % RANGES).to(tl.int32)
    found = _asm(add, "f", "ffffrrrr", totals + (thread, parity, meant, place))[0] * norm
    column = thread // 4 % COLUMNS
    row = unit * (32 // RANGES) + t * (8 // RANGES) + thread // 4 // COLUMNS
    wanted = (thread < COUNT) & (column < m) & (row < n)
    tl.store(out_ptr + column.to(tl.int64) * n + row, found.to(out_ptr.dtype.element_ty), mask=wanted)
