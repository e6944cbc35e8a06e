"""PTX of kernel.py: the table of decoded pairs, and what a warp does with a stage of codes.

A lane is (g, t), g = lane // 4 and t = lane % 4, as in PTX's description of `mma.m16n8k16`. It
holds rows g and g + 8 of the left operand, column g of the right one, and columns 2 t and 2 t + 1
of the result; t says which of the 16 k are its own. Which k those are does not matter as long as
both operands agree. Four lanes of one g are a *quad*.

A function returns the text of one asm statement; its operands are $0, $1, …, the results first. An
instruction stands on one line, because newer Tritons put `.loc` between lines.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def constraints(outputs: str, inputs: str) -> str:
    """Returns the constraints of an asm statement, of one letter for each operand.

    No output shares a register with an input.
    """
    letters = [f"=&{letter}" for letter in outputs]
    letters += list(inputs)
    return ",".join(letters)


@triton.constexpr_function
def result_types(outputs: str) -> tuple[tl.dtype, ...]:
    """Returns the types of an asm statement's results: "f" is float32, "r" int32."""
    return tuple(tl.float32 if letter == "f" else tl.int32 for letter in outputs)


@triton.constexpr_function
def fill_assembly(warps: int, shared_bytes: int, has_codes: bool, early: bool) -> str:
    """Lays out shared memory, fills `pairs`, and if `early` waits for the kernel before.

    `tiles` is for x, or for sums. `pairs` is the table of decoded pairs: the word of byte b, once
    for each of 32 banks, at 256 * (b % 128) + 128 * (b // 128). `codes`, which `meet_assembly`
    fills, is there if `has_codes`. These names live on to the end of the kernel.

    Nothing that another kernel may have written is read before `griddepcontrol.wait`.

    Operands: $0 the thread; $1 address of `tiles`; $2 address of the [256] words; $3 the thread.
    """
    stores = 64 // warps  # of 16 bytes by each lane: 16 lanes write the copies of two pairs
    lines = [".shared .align 256 .b8 pairs[32768];"]
    if has_codes:
        lines += [".shared .align 16 .b8 codes[1024];"]
    lines += [
        f".shared .align 1024 .b8 tiles[{shared_bytes}];",
        "{",
        ".reg .b32 b, a, w, h, v<16>;",
        ".reg .b64 o;",
        # w: the first word of this half of the warp; a: where its copies begin in shared memory
        "mov.u32 b, pairs;",
        "shr.u32 w, $3, 5;",
        f"mul.lo.u32 w, w, {2 * stores};",
        "bfe.u32 h, $3, 4, 1;",
        "add.u32 w, w, h;",
        "and.b32 a, $3, 15;",
        "shl.b32 a, a, 4;",
        "mad.lo.u32 a, w, 256, a;",
        "add.u32 a, a, b;",
        # lanes 8 … 15 of the half write the copies of byte w + 128
        "and.b32 h, $3, 8;",
        "shl.b32 h, h, 4;",
        "add.u32 w, w, h;",
        "mad.wide.u32 o, w, 4, $2;",
    ]
    for store in range(stores):
        lines += [f"ld.global.nc.b32 v{store}, [o+{8 * store}];"]
    for store in range(stores):
        word = f"v{store}"
        lines += [f"st.shared.v4.b32 [a+{512 * store}], {{{word}, {word}, {word}, {word}}};"]
    if early:
        lines += ["griddepcontrol.wait;", "griddepcontrol.launch_dependents;"]
    lines += [
        "mov.u32 $0, $3;",
        "mov.u32 $1, tiles;",
        "}",
    ]
    return "\n".join(lines)


@triton.constexpr_function
def meet_assembly(has_codes: bool, warps: int) -> str:
    """Fills `codes`, the values of nested absmax, if it is there; then waits until all threads have
    filled shared memory. `warps`: of a program, 8 at most if it is there.

    Operands: $0 the thread; $1 address of the [256] values; $2 the thread.
    """
    lines = []
    if has_codes:
        lines += [
            "{",
            ".reg .b32 w, c;",
            ".reg .b64 o;",
            "mad.wide.u32 o, $2, 4, $1;",
            "mov.u32 w, codes;",
            "mad.lo.u32 w, $2, 4, w;",
        ]
        for first in range(0, 256, 32 * warps):
            place = f"+{4 * first}" if first else ""
            lines += [f"ld.global.b32 c, [o{place}];", f"st.shared.b32 [w{place}], c;"]
        lines += ["}"]
    lines += ["bar.sync 0;", "mov.u32 $0, $2;"]
    return "\n".join(lines)


@triton.constexpr_function
def start_assembly(warps: int, shared_bytes: int, has_codes: bool) -> str:
    """Lays out and fills shared memory as `fill_assembly` and `meet_assembly` do, without waiting
    for the kernel before: its tables are older.

    Operands: $0 the thread; $1 address of `tiles`; $2 address of the [256] words of `pairs`; $3
    address of the [256] values of `codes`; $4 the thread.
    """
    fill: str = fill_assembly(warps, shared_bytes, has_codes, False).replace("$3", "$4")
    meet: str = meet_assembly(has_codes, warps).replace("$2", "$4").replace("$1", "$3")
    return fill + "\n" + meet


@triton.constexpr_function
def wait_assembly(signals: bool) -> str:
    """Waits for the kernel before, and lets the one behind begin if it `signals`.

    Operands: $0 the thread; $1 the thread.
    """
    signal = "griddepcontrol.launch_dependents;" if signals else ""
    return f"griddepcontrol.wait; {signal} mov.u32 $0, $1;"


@triton.constexpr_function
def x_assembly() -> str:
    """Loads 32 k of x. Not as constants, which the compiler would read before a wait.

    Operands: $0 … $15 the words; $16 their address, 0 for zeros.
    """
    lines = ["{", ".reg .pred p;", "setp.ne.b64 p, $16, 0;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(16)]
    for i in range(0, 16, 4):
        words = f"${i}, ${i + 1}, ${i + 2}, ${i + 3}"
        lines += [f"@p ld.global.v4.b32 {{{words}}}, [$16+{4 * i}];"]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def stacks_assembly(dtype: tl.dtype, stacks: int) -> str:
    """Multiplies a row tile of each stack, two slots, with x in registers: `mma`.

    Operands: the totals, two for each stack; the totals before; for each stack four words of each
    slot; scales; 4 * lane in each byte; 16 words of x. Scales are one for each stack, of which lane
    t has that of slot t // 2 and block t % 2.
    """
    lane = 13 * stacks
    lines = ["{", ".reg .b32 b, a, l, h, v<8>;", f".reg .f32 c<{4 * stacks}>, s;"]
    lines += ["mov.u32 b, pairs;"]
    lines += [f"mov.b32 c{i}, 0f00000000;" for i in range(4 * stacks)]
    x = [f"${lane + 1 + i}" for i in range(16)]
    lines += _multiply_tiles(dtype, x, [""] * stacks)
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _multiply_tiles(dtype: tl.dtype, x: list[str], guards: list[str]) -> list[str]:
    """Multiplies row tiles, two slots each, with 16 words of x, and adds the sums, times their
    scales, to the totals before. Each tile's look-ups have a guard.

    Operands are those of `stacks_assembly`, a tile in the place of a stack.
    """
    tiles = len(guards)
    words = 4 * tiles
    scales = 12 * tiles
    lane = 13 * tiles
    kind = dtype.name.replace("fp", "f")
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    lines = []
    for word in range(4):
        for tile, guard in enumerate(guards):
            upper = words + 8 * tile + word  # the operand of rows g
            lines += [
                decode_assembly(f"${upper}", lane, 0, guard),
                decode_assembly(f"${upper + 4}", lane, 4, guard),
            ]
            sums = ", ".join(f"c{4 * tile + i}" for i in range(4))
            for i in (0, 2):
                left = f"{{v{i}, v{i + 4}, v{i + 1}, v{i + 5}}}"
                right = f"{{{x[4 * word + i]}, {x[4 * word + i + 1]}}}"
                lines += [f"{mma} {{{sums}}}, {left}, {right}, {{{sums}}};"]
    for index in range(4 * tiles):  # two blocks of each slot, whose sums are in two columns
        slot = index // 2
        before = slot if index % 2 else slot + 2 * tiles
        lines += [
            scale_assembly(scales, index),
            f"fma.rn.f32 ${slot}, c{index}, s, ${before};",
        ]
    return lines


@triton.constexpr_function
def add_across(distance: int) -> str:
    """Adds the float of the lane that is `distance` away, its number's bit.

    Operands: $0 the sum; $1 the float.
    """
    move = f"shfl.sync.bfly.b32 v, $1, {distance}, 31, -1;"
    return "\n".join(["{", ".reg .f32 v;", move, "add.f32 $0, $1, v;", "}"])


@triton.constexpr_function
def unit_assembly(steps: int) -> str:
    """Loads the packed codes of two slots for each step, 128 bytes apart; they are used once.

    Operands: for each step four words of each slot; the address of the first slot and step; from
    there to the second slot; for each step how many rows are left: the slots are rows 0 and 4.
    """
    base = 8 * steps
    lines = ["{", ".reg .b64 a;", ".reg .pred p;", f"add.s64 a, ${base}, ${base + 1};"]
    for slot, address in enumerate((f"${base}", "a")):
        for step in range(steps):
            first = 8 * step + 4 * slot
            words = ", ".join(f"${first + i}" for i in range(4))
            lines += [
                f"setp.gt.s32 p, ${base + 2 + step}, {4 * slot};",
                f"@p ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {{{words}}}, "
                f"[{address}+{128 * step}];",
            ]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def prefetch_assembly(steps: int) -> str:
    """Brings what `unit_assembly` loads to L2.

    Operands: $0 zero; then those of `unit_assembly` that are no words.
    """
    lines = ["{", ".reg .b64 a;", ".reg .pred p;", "add.s64 a, $1, $2;"]
    for slot, address in enumerate(("$1", "a")):
        for step in range(steps):
            lines += [
                f"setp.gt.s32 p, ${3 + step}, {4 * slot};",
                f"@p prefetch.global.L2 [{address}+{128 * step}];",
            ]
    return "\n".join([*lines, "mov.b32 $0, 0;", "}"])


@triton.constexpr_function
def words_assembly(width: int, loads: int, asked: bool) -> str:
    """Loads packed codes that are used once.

    Operands: the words, `width` for each load; the base address; for each load the number of
    8-byte pieces behind the base; and if `asked`, whether to load at all.
    """
    base = loads * width
    lines = ["{", ".reg .b64 a;", ".reg .pred p;"]
    guard = ""
    if asked:
        guard = "@p "
        lines += [f"setp.ne.b32 p, ${base + loads + 1}, 0;"]
    for load in range(loads):
        words = ", ".join(f"${load * width + i}" for i in range(width))
        lines += [
            f"mad.wide.u32 a, ${base + 1 + load}, 8, ${base};",
            f"{guard}ld.global.nc.L1::no_allocate.L2::128B.v{width}.b32 {{{words}}}, [a];",
        ]
    lines += ["}"]
    return "\n".join(lines)


@triton.constexpr_function
def split_word(word: str, lane: str) -> list[str]:
    """Divides a word of codes for find_pair: l holds 4 * lane and the top bit of each byte, h the
    other bits. `lane` has 4 * lane in each byte.
    """
    return [
        f"lop3.b32 l, {word}, 0x80808080, {lane}, 0xea;",  # (word & 0x80808080) | lane
        f"and.b32 h, {word}, 0x7f7f7f7f;",
    ]


@triton.constexpr_function
def find_pair(byte: int, pairs: str) -> list[str]:
    """Finds the address a of a byte's pair in the table that begins at `pairs`: a `prmt` puts a
    byte of l and one of h together.
    """
    pick = ("0xcc40", "0xdd51", "0xee62", "0xff73")[byte]
    return [f"prmt.b32 a, l, h, {pick};", f"add.u32 a, a, {pairs};"]


@triton.constexpr_function
def decode_assembly(word: str, lane: int, target: int, guard: str = "") -> str:
    """Decodes the four bytes of register `word` to registers v[target] … v[target + 3], each of two
    values.

    Operand `lane` holds 4 * lane in each byte. The loads have a `guard`, such as "@p ".
    """
    lines: list[str] = split_word(word, f"${lane}")
    for byte in range(4):
        lines += [*find_pair(byte, "b"), f"{guard}ld.shared.b32 v{target + byte}, [a];"]
    return "\n".join(lines)


@triton.constexpr_function
def scale_assembly(operand: int, index: int) -> str:
    """Sets s to a scale: that which lane index % 4 of the quad holds in operand + index // 4."""
    return f"shfl.sync.idx.b32 s, ${operand + index // 4}, {index % 4}, 0x1c03, -1;"


@triton.constexpr_function
def wide_assembly(dtype: tl.dtype) -> str:
    """Multiplies a stage of two row tiles with x from global memory: `mma`.

    Operands: totals of four slots; the totals before; four words of each slot; scales; 4 * lane in
    each byte; the address of 32 k of x, 0 for zeros; whether slots 2 and 3 are looked up; if not,
    their totals mean nothing.
    """
    lane = 26  # behind 4 totals, the 4 before, 16 words and 2 scales
    lines = [
        "{",
        ".reg .b32 b, a, l, h, x<16>, v<8>;",
        ".reg .f32 c<8>, s;",
        ".reg .pred p;",
        "mov.u32 b, pairs;",
    ]
    lines += [f"mov.b32 x{i}, 0;" for i in range(16)]
    lines += [f"mov.b32 c{i}, 0f00000000;" for i in range(8)]
    lines += [f"setp.ne.b64 p, ${lane + 1}, 0;"]
    for i in range(0, 16, 4):
        read = ", ".join(f"x{i + j}" for j in range(4))
        lines += [f"@p ld.global.nc.v4.b32 {{{read}}}, [${lane + 1}+{4 * i}];"]
    lines += [f"setp.ne.b32 p, ${lane + 2}, 0;"]
    lines += _multiply_tiles(dtype, [f"x{i}" for i in range(16)], ["", "@p "])
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def gather_assembly(parts: int, count: int) -> str:
    """Adds up `parts` floats in shared memory, `count` apart, that all warps have left there.

    Behind this, the warps may overwrite them.

    Operands: $0 the sum; $1 address of the first; $2 whether this thread adds.
    """
    lines = [
        "{",
        ".reg .f32 v;",
        ".reg .pred p;",
        "bar.sync 0;",
        "mov.f32 $0, 0f00000000;",
        "setp.ne.b32 p, $2, 0;",
    ]
    for part in range(parts):
        lines += [f"@p ld.shared.f32 v, [$1+{4 * part * count}];", "@p add.f32 $0, $0, v;"]
    lines += ["bar.sync 0;", "}"]
    return "\n".join(lines)
