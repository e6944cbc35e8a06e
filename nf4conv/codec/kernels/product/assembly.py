"""PTX of kernel.py: the table of decoded pairs, and what a warp does with a stage of codes.

A lane is (g, t), g = lane // 4 and t = lane % 4, as in PTX's description of `mma.m16n8k16`: it
holds rows g and g + 8 of the left operand, column g of the right one, columns 2 t and 2 t + 1 of
the result, and t says which of the 16 k are its own. Which k those are does not matter as long as
both operands agree.
"""

from typing import Any

import triton
import triton.language as tl


@triton.constexpr_function
def letters(outputs: str, inputs: str) -> str:
    """The constraints of an asm statement; no output shares a register with an input."""
    return ",".join([f"=&{kind}" for kind in outputs] + list(inputs))


@triton.constexpr_function
def kinds(outputs: str) -> tuple[tl.dtype, ...]:
    return tuple(tl.float32 if kind == "f" else tl.int32 for kind in outputs)


@triton.constexpr_function
def fill_assembly(warps: int, shared_bytes: int, has_codes: bool) -> str:
    """Lay out shared memory: `tiles`, and `pairs`, which is filled: both values of byte b, once for
    each of 32 banks, at 256 * (b % 128) + 128 * (b // 128); and `codes`, for `meet_assembly`.
    Nothing that another kernel may have written is read before `wait`. The names live on to the end
    of the kernel.

    Operands: $0 the thread; $1 address of `tiles`; $2 address of the [256] words; $3 the thread.
    """
    stores = 64 // warps  # of 16 bytes a lane: 16 lanes write the copies of two pairs
    lines = [".shared .align 256 .b8 pairs[32768];", ".shared .align 16 .b8 codes[1024];"][
        : 1 + has_codes
    ]
    lines += [
        f".shared .align 1024 .b8 tiles[{shared_bytes}]; {{ .reg .b32 b, a, w, h, v<16>; .reg "
        f".b64 o;"
    ]
    lines += [
        f"mov.u32 b, pairs; shr.u32 w, $3, 5; mul.lo.u32 w, w, {2 * stores}; bfe.u32 h, $3, 4, 1;"
    ]
    lines += [
        "add.u32 w, w, h; and.b32 a, $3, 15; shl.b32 a, a, 4; mad.lo.u32 a, w, 256, a; add.u32 a, "
        "a, b;"
    ]
    lines += ["and.b32 h, $3, 8; shl.b32 h, h, 4; add.u32 w, w, h; mad.wide.u32 o, w, 4, $2;"]
    lines += [f"ld.global.nc.b32 v{i}, [o+{8 * i}];" for i in range(stores)]
    lines += [f"st.shared.v4.b32 [a+{512 * i}], {{v{i}, v{i}, v{i}, v{i}}};" for i in range(stores)]
    lines += [
        "griddepcontrol.wait; griddepcontrol.launch_dependents; mov.u32 $0, $3; mov.u32 $1, "
        "tiles; }"
    ]
    return "\n".join(lines)


@triton.constexpr_function
def meet_assembly(has_codes: bool) -> str:
    """Fill `codes`, the values of nested absmax, by 256 threads, and wait until all of shared
    memory is filled.

    Operands: $0 the thread; $1 address of the values; $2 the thread.
    """
    fill = (
        "mad.wide.u32 o, $2, 4, $1; mov.u32 w, codes; mad.lo.u32 w, $2, 4, w; ld.global.b32 c, [o];"
    )
    fill = f"{{ .reg .b32 w, c; .reg .b64 o; {fill} st.shared.b32 [w], c; }}" if has_codes else ""
    return fill + "bar.sync 0; mov.u32 $0, $2;"


@triton.constexpr_function
def words_assembly(width: int, loads: int, asked: bool) -> str:
    """Operands: words, `width` of each load; base; for each load the pieces of 8 bytes behind it;
    whether, if asked.
    """
    lines = ["{ .reg .b64 a; .reg .pred p;"]
    lines += [f"setp.ne.b32 p, ${loads * (width + 1) + 1}, 0;"] if asked else []
    for load in range(loads):
        words = ", ".join(f"${load * width + i}" for i in range(width))
        lines += [f"mad.wide.u32 a, ${loads * width + 1 + load}, 8, ${loads * width};"]
        lines += [
            f"{'@p ' * asked}ld.global.nc.L1::no_allocate.L2::128B.v{width}.b32 {{{words}}}, [a];"
        ]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _decode(word: int, lane: int, target: int, guard: str = "") -> str:
    """v[target…target + 3], two values in each; a permute makes an address of two bytes, `lane` is
    in each byte.
    """
    lines = [f"lop3.b32 l, ${word}, 0x80808080, ${lane}, 0xea; and.b32 h, ${word}, 0x7f7f7f7f;"]
    for i, pick in enumerate(("0xcc40", "0xdd51", "0xee62", "0xff73")):
        lines += [
            f"prmt.b32 a, l, h, {pick}; add.u32 a, a, b; {guard}ld.shared.b32 v{target + i}, [a];"
        ]
    return "\n".join(lines)


@triton.constexpr_function
def _scale(operand: int, index: int) -> str:
    """s: the scale that the quad's lane index % 4 holds in operand + index // 4."""
    return f"shfl.sync.idx.b32 s, ${operand + index // 4}, {index % 4}, 0x1c03, -1;"


@triton.constexpr_function
def wide_assembly(dtype: tl.dtype) -> str:
    """A stage of two row tiles with x from global memory. Operands: $0…$3 totals of four slots;
    $4…$7 the same before; $8…$23 four words of each slot; $24, $25 scales; $26 4 * lane in each
    byte; $27 address of 32 k of x, 0 for zeros; $28 whether slots 2 and 3 are looked up; their
    totals mean nothing otherwise.
    """
    kind = dtype.name.replace("fp", "f")
    lines = [
        "{ .reg .b32 b, a, l, h, x<16>, v<8>; .reg .f32 c<8>, s; .reg .pred p; mov.u32 b, pairs;"
    ]
    lines += ["setp.ne.b64 p, $27, 0;", *[f"mov.b32 x{i}, 0;" for i in range(16)]]
    lines += [f"mov.b32 c{i}, 0f00000000;" for i in range(8)]
    for i in range(0, 16, 4):
        lines += [f"@p ld.global.nc.v4.b32 {{x{i}, x{i + 1}, x{i + 2}, x{i + 3}}}, [$27+{4 * i}];"]
    lines += ["setp.ne.b32 p, $28, 0;"]
    for word in range(4):
        for c in (0, 4):
            guard = "@p " if c else ""
            lines += [
                _decode(8 + 2 * c + word, 26, 0, guard),
                _decode(12 + 2 * c + word, 26, 4, guard),
            ]
            sums = f"{{c{c}, c{c + 1}, c{c + 2}, c{c + 3}}}"
            for i in (0, 2):
                left, right = (
                    f"v{i}, v{i + 4}, v{i + 1}, v{i + 5}",
                    f"x{4 * word + i}, x{4 * word + i + 1}",
                )
                mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
                lines += [
                    f"{mma} {sums}, {{{left}}}, {{{right}}}, {sums};"
                ]  # newer Tritons put .loc between lines
    for index in range(8):
        slot = index // 2
        lines += [
            _scale(24, index),
            f"fma.rn.f32 ${slot}, c{index}, s, ${slot if index % 2 else slot + 4};",
        ]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def tile_assembly(dtype: tl.dtype, shape: Any, part: int) -> str:
    """A part of a stage, launches.Shape's `copied` blocks, with tiles of x in shared memory: `wgmma`.

    A tile is 64 k of 8 * column_tiles rows of x, 128 bytes a row, whose 16-byte pieces stand in the
    order that the tensor cores expect. The products of one row tile and block are under way while
    the next are decoded.

    Operands: the totals, for each row tile and column tile two of row g, two of row g + 8; the same
    before; for each slot two words of each block; scales; 4 * lane in each byte; the address of the
    tiles.
    """
    blocks, kind = shape.blocks, dtype.name.replace("fp", "f")
    sums, totals, first = 4 * shape.column_tiles, shape.totals, part * shape.copied
    scales = 2 * totals + shape.words
    lane = scales + shape.scales
    lines = [
        f"{{ .reg .b32 b, a, l, h, v<32>; .reg .f32 c<{2 * sums}>, s; .reg .b64 d, e; .reg .pred p;"
    ]
    lines += [
        f"mov.u32 b, pairs; shr.u32 a, ${lane + 1}, 4; cvt.u64.u32 d, a; or.b64 d, d, "
        f"0x4000004000010000;"
    ]
    groups = [
        (part, tile)
        for part in range(first, first + shape.copied)
        for tile in range(shape.slots // 2)
    ]

    def add(number: int) -> list[str]:
        part, tile = groups[number]
        added = []
        for i in range(sums):
            if i % 2 == 0:
                added.append(_scale(scales, (2 * tile + i // 2 % 2) * blocks + part))
            target = tile * sums + i
            before = target if part > first else totals + target
            added.append(f"fma.rn.f32 ${target}, c{number % 2 * sums + i}, s, ${before};")
        return added

    for number in range(len(groups)):
        part, tile = groups[number]
        v = number % 2 * 16
        for i in range(4):
            word = 2 * totals + (2 * tile + i // 2) * 2 * blocks + 2 * part + i % 2
            lines += [_decode(word, lane, v + 4 * i)]
        listed = ", ".join(f"c{number % 2 * sums + i}" for i in range(sums))
        lines += [
            f"add.s64 e, d, {(part - first) * sums * 16}; setp.ne.b32 p, 0, 0; "
            f"wgmma.fence.sync.aligned;"
        ]
        for i in range(v, v + 8, 2):
            wgmma = f"wgmma.mma_async.sync.aligned.m64n{2 * sums}k16.f32.{kind}.{kind} {{{listed}}}"
            lines += [f"{wgmma}, {{v{i}, v{i + 8}, v{i + 1}, v{i + 9}}}, e, p, 1, 1, 0;"]
            lines += ["add.s64 e, e, 2; setp.eq.b32 p, 0, 0;"]
        lines += ["wgmma.commit_group.sync.aligned;"]
        if number:
            lines += ["wgmma.wait_group.sync.aligned 1;", *add(number - 1)]
    return "\n".join([*lines, "wgmma.wait_group.sync.aligned 0;", *add(len(groups) - 1), "}"])


@triton.constexpr_function
def gather_assembly(parts: int, count: int) -> str:
    """Add up `parts` floats in shared memory, `count` apart, that all warps have left there and may
    overwrite then.

    Operands: $0 the sum; $1 address of the first; $2 whether this thread does.
    """
    lines = [
        "{ .reg .f32 v; .reg .pred p; bar.sync 0; mov.f32 $0, 0f00000000; setp.ne.b32 p, $2, 0;"
    ]
    for part in range(parts):
        lines += [f"@p ld.shared.f32 v, [$1+{4 * part * count}]; @p add.f32 $0, $0, v;"]
    return "\n".join([*lines, "bar.sync 0; }"])
