"""Runs the PTX of kernels/product/ without a GPU: numpy executes each instruction for all threads
of a program.

Registers hold raw bits in uint64. Barriers do nothing then, and what would be a race is not seen.
Branches must be taken by all threads or none. Run as a program: Triton can not compile in a process
whose kernels are interpreted.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import triton
from products import assert_close_to_exact, packed_weight
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nf4conv.codec.kernels import tables
from nf4conv.codec.kernels.product import kernel, launches
from nf4conv.codec.quant_state import QuantState, decoding_of

Bits = np.ndarray
GLOBAL = 1 << 40
"""Tensors begin at multiples of this."""

INTEGER = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": np.minimum,
    "max": np.maximum, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
COMPARE = {
    "lt": np.less,
    "gt": np.greater,
    "le": np.less_equal,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
SKIPPED = (
    "bar",
    "griddepcontrol",
    "prefetch",
    "fence",
    "cp.async.wait",
    "wgmma.fence",
    "wgmma.commit",
    "wgmma.wait",
)


def width(kind: str) -> int:
    return 1 if kind == "pred" else int(kind[1:].removeprefix("f") if kind != "bf16" else 16)


def cut(bits: Bits, count: int) -> Bits:
    return bits if count == 64 else bits & np.uint64((1 << count) - 1)


def number(bits: Bits, kind: str) -> np.ndarray:
    """The values of bits: float64 of f32, int64 of anything else."""
    if kind == "f32":
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    count = width(kind)
    bits = cut(bits, count)
    return (
        bits.astype(f"uint{count}").view(f"int{count}").astype(np.int64)
        if kind[0] == "s"
        else bits.view(np.int64)
    )


def raw(values: np.ndarray, kind: str) -> Bits:
    if kind == "f32":
        return values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return cut(values.astype(np.int64).view(np.uint64), width(kind))


def halves(bits: Bits, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """The low and high 16-bit floats of 32 bits."""
    parts = torch.from_numpy(bits.astype(np.uint32).view(np.int16).copy())
    values = parts.view(torch.bfloat16 if kind == "bf16" else torch.float16).double().numpy()
    return values[0::2], values[1::2]


def operands(text: str) -> list[str]:
    return [one.strip() for one in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]])+", text)]


def listed(operand: str) -> list[str]:
    return [one.strip() for one in operand.strip("{} ").split(",")]


def statements(ptx: str) -> tuple[list[tuple[str, str, list[str]]], dict[str, int], dict[str, int]]:
    """(predicate, operation, operands) of each statement; where labels are; addresses in shared
    memory.
    """
    body = ptx[ptx.index(".visible .entry") :]
    body = body[body.index("{", body.index(")")) + 1 :].partition(".section")[0]
    body = re.sub(r"//[^\n]*|\.(?:loc|file|pragma)[^\n]*|\.reg [^;]*;", " ", body)
    places, end = {}, 1024  # the first kilobyte is the system's
    for align, name, size in re.findall(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\];", body):
        places[name] = -(-end // int(align)) * int(align)
        end = places[name] + int(size)
    body = (
        re.sub(r"\.shared [^;]*;", " ", re.sub(r"\.shared \.align[^;]*;", " ", body))
        if places
        else body
    )
    found: list[tuple[str, str, list[str]]] = []
    labels: dict[str, int] = {}
    for statement in re.sub(r"(\$L\w+):", r"label \1;", body).split(";"):
        words = " ".join(statement.split()).lstrip("{} ").split(None, 1)
        predicate = words.pop(0)[1:] if words and words[0].startswith("@") else ""
        if predicate:
            words = words[0].split(None, 1)
        if words and words[0] == "label":
            labels[words[1]] = len(found)
        elif words:
            found.append((predicate, words[0], operands(words[1]) if len(words) > 1 else []))
    return found, labels, places


class Machine:
    """One program after the other, on tensors that stay."""

    def __init__(
        self,
        ptx: str,
        threads: int,
        parameters: dict[str, int],
        tensors: dict[int, Bits],
        grid: int,
    ) -> None:
        self.code, self.labels, self.places = statements(ptx)
        self.threads, self.parameters, self.tensors = threads, parameters, tensors
        self.fixed = self.places | {"%nctaid.x": grid}

    def run(self, program: int) -> None:
        self.registers: dict[str, Bits] = {"%tid.x": np.arange(self.threads, dtype=np.uint64)}
        self.fixed["%ctaid.x"] = program
        self.shared = np.full(1 << 16, 0xCD, np.uint8)
        place = 0
        while self.code[place][1] != "ret":
            predicate, operation, names = self.code[place]
            place += 1
            mask = self.mask(predicate)
            if operation.startswith("bra"):
                assert mask.all() or not mask.any(), "threads part"
                place = self.labels[names[0]] if mask.all() else place
            elif not operation.startswith(SKIPPED):
                self.step(operation.split("."), names, mask)

    def mask(self, predicate: str) -> np.ndarray:
        if not predicate:
            return np.ones(self.threads, bool)
        return self.get(predicate.lstrip("!")).astype(bool) ^ predicate.startswith("!")

    def get(self, name: str) -> Bits:
        if name in self.registers:
            return self.registers[name]
        value = (
            self.fixed[name]
            if name in self.fixed
            else int(name[2:], 16)
            if name[:2] == "0f"
            else int(name, 0)
        )
        return np.full(self.threads, value & (2**64 - 1), np.uint64)

    def put(self, name: str, bits: Bits, mask: np.ndarray) -> None:
        old = self.registers.get(name, np.full(self.threads, 0xBAD, np.uint64))
        self.registers[name] = np.where(mask, bits, old)

    def step(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        kind = parts[-1]
        name = "ld_param" if parts[:2] == ["ld", "param"] else parts[0]
        special: Callable[[list[str], list[str], np.ndarray], None] | None = getattr(
            self, f"do_{name}", None
        )
        if special:
            special(parts, names, mask)
        elif name == "setp":
            compared = COMPARE[parts[1]](*(number(self.get(one), kind) for one in names[1:]))
            self.put(names[0], compared.astype(np.uint64), mask)
        elif name in ("fma", "mad"):
            a, b = (number(self.get(one), kind) for one in names[1:3])
            wide = WIDE[kind] if "wide" in parts else kind
            self.put(names[0], raw(a * b + number(self.get(names[3]), wide), wide), mask)
        elif kind == "s16x2":
            values = [self.get(one) for one in names[1:]]
            low, high = (
                raw(INTEGER[name](*(one >> np.uint64(by) for one in values)), "s16")
                for by in (0, 16)
            )
            self.put(names[0], low | high << np.uint64(16), mask)
        else:
            values = [number(self.get(one), "u1" if kind == "pred" else kind) for one in names[1:]]
            wide = WIDE[kind] if "wide" in parts else kind
            self.put(names[0], raw(INTEGER[name](*values), wide), mask)

    def do_ld_param(self, _: list[str], names: list[str], mask: np.ndarray) -> None:
        self.put(names[0], np.uint64(self.parameters[names[1].strip("[]")]), mask)

    def memory(
        self, operand: str, parts: list[str], mask: np.ndarray
    ) -> list[tuple[Bits, np.ndarray, np.ndarray]]:
        """(memory, threads, places in it) of an access."""
        name, _, offset = operand.strip("[] ").partition("+")
        address = self.get(name.strip()).astype(np.int64) + int(offset or 0)
        if "shared" in parts:
            return [(self.shared, np.flatnonzero(mask), address[mask])]
        tensors = np.unique(address[mask] // GLOBAL)
        chosen = [
            (self.tensors[int(one)], np.flatnonzero(mask & (address // GLOBAL == one)))
            for one in tensors
        ]
        return [(memory, threads, address[threads] % GLOBAL) for memory, threads in chosen]

    def do_ld(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        size, targets = width(parts[-1]) // 8, listed(names[0])
        values = np.zeros((self.threads, size * len(targets)), np.uint64)
        for memory, threads, places in self.memory(names[1], parts, mask):
            values[threads] = memory[
                places[:, None] + np.arange(values.shape[1])
            ]  # IndexError: behind the end
        shifts = np.arange(size, dtype=np.uint64) * np.uint64(8)
        for i, target in enumerate(targets):
            self.put(
                target,
                (values[:, i * size : (i + 1) * size] << shifts).sum(axis=1, dtype=np.uint64),
                mask,
            )

    def do_st(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        shifts = np.arange(width(parts[-1]) // 8, dtype=np.uint64) * np.uint64(8)
        values = np.concatenate(
            [self.get(one)[:, None] >> shifts for one in listed(names[1])], axis=1
        ).astype(np.uint8)
        for memory, threads, places in self.memory(names[0], parts, mask):
            memory[places[:, None] + np.arange(values.shape[1])] = values[threads]

    def do_cp(self, _: list[str], names: list[str], __: np.ndarray) -> None:
        """cp.async of so many bytes, zeros where the last operand is 0."""
        values = np.zeros((self.threads, int(names[2])), np.uint8)
        for memory, threads, places in self.memory(names[1], ["global"], self.get(names[3]) > 0):
            values[threads] = memory[places[:, None] + np.arange(values.shape[1])]
        self.shared[
            self.get(names[0].strip("[] "))[:, None].astype(np.int64) + np.arange(values.shape[1])
        ] = values

    def do_mov(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        targets, sources = listed(names[0]), listed(names[1])
        count = width(parts[-1]) // max(len(targets), len(sources))
        whole = sum(
            (self.get(one) << np.uint64(count * i) for i, one in enumerate(sources)), np.uint64(0)
        )
        for i, target in enumerate(targets):
            self.put(
                target, cut(whole >> np.uint64(count * i), 64 if len(targets) == 1 else count), mask
            )

    def do_div(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        a, b = (number(self.get(one), parts[-1]) for one in names[1:])
        quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
        self.put(
            names[0], raw(quotient if parts[0] == "div" else a - quotient * b, parts[-1]), mask
        )

    do_rem = do_div

    def do_shl(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        value, count = (
            number(self.get(names[1]), parts[-1]),
            np.minimum(number(self.get(names[2]), "u32"), 63),
        )
        self.put(
            names[0], raw(value << count if parts[0] == "shl" else value >> count, parts[-1]), mask
        )

    do_shr = do_shl

    def do_selp(self, _: list[str], names: list[str], mask: np.ndarray) -> None:
        self.put(
            names[0], np.where(self.get(names[3]), self.get(names[1]), self.get(names[2])), mask
        )

    def do_not(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        self.put(names[0], cut(~self.get(names[1]), width(parts[-1])), mask)

    def do_cvt(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        target, source = parts[-2:]
        values = [number(self.get(one), source) for one in names[1:]]
        if source == "f32":
            dtype = torch.float16 if "f16" in target and "bf16" not in target else torch.bfloat16
            rounded = [
                torch.from_numpy(one).float().to(dtype).view(torch.int16).numpy().view(np.uint16)
                for one in values
            ]
            values = [
                sum(one.astype(np.int64) << 16 * i for i, one in enumerate(reversed(rounded)))
            ]
            target = "u32"
        self.put(names[0], raw(values[0], target), mask)

    def do_lop3(self, _: list[str], names: list[str], mask: np.ndarray) -> None:
        assert names[4] == "0xea"
        a, b, c = (self.get(one) for one in names[1:4])
        self.put(names[0], cut((a & b) | c, 32), mask)

    def do_prmt(self, _: list[str], names: list[str], mask: np.ndarray) -> None:
        source, total = (
            cut(self.get(names[1]), 32) | self.get(names[2]) << np.uint64(32),
            np.uint64(0),
        )
        for i in range(4):
            pick = int(names[3], 0) >> 4 * i & 15
            byte = source >> np.uint64(8 * (pick & 7)) & np.uint64(255)
            total = total | (
                np.where(byte > 127, 255, 0).astype(np.uint64) if pick & 8 else byte
            ) << np.uint64(8 * i)
        self.put(names[0], total, mask)

    def do_bfe(self, _: list[str], names: list[str], mask: np.ndarray) -> None:
        self.put(names[0], cut(self.get(names[1]) >> self.get(names[2]), int(names[3])), mask)

    def do_shfl(self, _: list[str], names: list[str], mask: np.ndarray) -> None:
        lane, segment = np.arange(self.threads), int(names[3], 0) >> 8 & 31
        self.put(
            names[0],
            self.get(names[1])[lane // 32 * 32 + (lane % 32 & segment | int(names[2]))],
            mask,
        )

    def left(self, operand: str, kind: str) -> np.ndarray:
        """[warps, 16, 16]: as PTX places them in lanes (g, t)."""
        g, t = np.divmod(np.arange(32), 4)
        found = np.zeros((self.threads // 32, 16, 16))
        for i, one in enumerate(listed(operand)):
            for half, values in enumerate(halves(self.get(one), kind)):
                found[:, g + i % 2 * 8, 2 * t + i // 2 * 8 + half] = values.reshape(-1, 32)
        return found

    def put_sums(
        self, found: np.ndarray, targets: list[str], before: list[np.ndarray], mask: np.ndarray
    ) -> None:
        g, t = np.divmod(np.arange(32), 4)
        for i, (target, old) in enumerate(zip(targets, before, strict=True)):
            sums = found[:, g + i // 2 % 2 * 8, 2 * t + i // 4 * 8 + i % 2].reshape(-1)
            self.put(target, raw(old + sums, "f32"), mask)

    def do_mma(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        """m16n8k16."""
        g, t = np.divmod(np.arange(32), 4)
        right = np.zeros((self.threads // 32, 16, 8))
        for i, one in enumerate(listed(names[2])):
            for half, values in enumerate(halves(self.get(one), parts[-2])):
                right[:, 2 * t + i * 8 + half, g] = values.reshape(-1, 32)
        before = [number(self.get(one), "f32") for one in listed(names[3])]
        self.put_sums(self.left(names[1], parts[-2]) @ right, listed(names[0]), before, mask)

    def do_wgmma(self, parts: list[str], names: list[str], mask: np.ndarray) -> None:
        """m64nNk16, the right operand in shared memory: rows of 128 bytes, whose pieces are
        swizzled.
        """
        (descriptor,) = np.unique(self.get(names[2]))
        assert descriptor >> np.uint64(16) == 0x400000400001
        k, n = (
            np.arange(16)[:, None],
            np.arange(int(parts[4].removeprefix("m64n").removesuffix("k16"))),
        )
        place = (int(descriptor) & 0x3FFF) * 16 + n * 128 + k * 2
        place ^= (place >> 7 & 7) << 4
        low, _ = halves(
            (
                self.shared[place] + self.shared[place + 1].astype(np.uint64) * np.uint64(256)
            ).ravel(),
            parts[-1],
        )
        kept = self.mask(names[3])
        before = [
            np.where(kept, number(self.get(one), "f32"), 0.0) if kept.all() else 0.0
            for one in listed(names[0])
        ]
        self.put_sums(
            self.left(names[1], parts[-1]) @ low.reshape(16, -1), listed(names[0]), before, mask
        )


TARGET = GPUTarget("cuda", 90, 32)
NAMES = ("x", "out", "packed", "absmax", "code", "nested_absmax", "offset", "pair")


def compiled(shape: launches.Shape, dtype: torch.dtype, out: torch.dtype) -> str:
    """The PTX of product_kernel."""
    kinds = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
    absmax = ("*u8" if shape.nested else "*fp32", "*fp32", "*fp32", "*fp32")
    pointers = (kinds[dtype], kinds[out], "*u8", *absmax, "*i32")
    signature = {f"{name}_ptr": kind for name, kind in zip(NAMES, pointers, strict=True)}
    signature |= dict.fromkeys(
        ("m", "n", "k", "steps", "share", "split_shift", "block_shift"), "i32"
    )
    signature |= {"norm": "fp32", "C": "constexpr"}
    source = ASTSource(fn=kernel.product_kernel, signature=signature, constexprs={"C": shape})
    options = {
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
        "launch_pdl": True,
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=TARGET, options=options).asm["ptx"]


def multiply(
    x: torch.Tensor, packed: torch.Tensor, state: QuantState, programs: int
) -> torch.Tensor:
    """The kernel's product, as `programs` programs, one after the other; what stands around it in
    plain torch.
    """
    decoding, device = decoding_of(state), torch.device("cpu")
    (m, k), n = x.shape, state.shape[0]
    shape = replace(next(one for one in launches.SHAPES if m <= one.rows), nested=state.nested)
    sizes, shift, grid = launches.plan(shape, m, n, k, programs)
    out = torch.full((1 << shift, m, n), float("nan"), dtype=torch.float32 if shift else x.dtype)
    ordered = (
        x if shape.wide else x.view(torch.int32).view(m, -1, 4, 8).transpose(2, 3).contiguous()
    )
    tensors = (
        ordered,
        out,
        packed,
        *decoding.pointers(),
        tables.pair_table(decoding.quant_type, x.dtype, device),
    )
    buffers = {
        i + 1: one.reshape(-1).view(torch.uint8).numpy().copy() for i, one in enumerate(tensors)
    }
    norm = np.float32(1 / tables.MULTIPLES[decoding.quant_type, x.dtype])
    scaling = [(decoding.blocksize // 64).bit_length() - 1, int(norm.view(np.uint32))]
    values = [(i + 1) << 40 for i in range(8)] + [*sizes, shift, *scaling, 0, 0]
    parameters = {f"product_kernel_param_{i}": value for i, value in enumerate(values)}
    machine = Machine(
        compiled(shape, x.dtype, out.dtype), 32 * shape.warps, parameters, buffers, grid
    )
    for program in range(grid):
        machine.run(program)
    return (
        torch.from_numpy(buffers[2])
        .view(out.dtype)
        .view(out.shape)
        .sum(0, dtype=torch.float32)
        .to(x.dtype)
    )


if __name__ == "__main__":
    worst = 0.0
    for m, n, k, quant_type, blocksize, nested, dtype in (
        (1, 37, 576, "nf4", 64, True, torch.bfloat16),
        (1, 300, 4160, "nf4", 64, True, torch.bfloat16),
        (
            1,
            700,
            192,
            "nf4",
            64,
            False,
            torch.bfloat16,
        ),  # more units than wait for each other's sums
        (1, 33, 14336, "nf4", 4096, True, torch.float16),
        (2, 200, 2112, "fp4", 128, False, torch.bfloat16),
        (2, 1, 64, "nf4", 64, False, torch.float16),
        (3, 70, 4160, "fp4", 4096, True, torch.float16),
        (4, 300, 1088, "nf4", 64, True, torch.bfloat16),
        (5, 300, 576, "nf4", 64, True, torch.bfloat16),
        (13, 1000, 320, "fp4", 64, True, torch.bfloat16),
        (16, 130, 4160, "nf4", 128, True, torch.float16),
        (32, 1500, 192, "fp4", 64, False, torch.bfloat16),
        (31, 130, 2112, "nf4", 64, True, torch.float16),
        (40, 300, 1088, "nf4", 64, True, torch.bfloat16),
        (64, 900, 320, "nf4", 4096, False, torch.float16),
    ):
        packed, state = packed_weight(n, k, quant_type, blocksize, nested)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
        assert_close_to_exact(multiply(x, packed, state, 6), x, packed, state)
        print(m, n, k, quant_type, blocksize, nested, dtype)
