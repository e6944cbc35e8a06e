"""Executes PTX without a GPU: numpy executes each instruction for all threads of a program.

Registers hold raw bits in uint64. All threads execute an instruction at once, so barriers do
nothing, and a race is not noticed. All threads must take a branch, or none.
"""

import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from ptx_program import Words, listed, parse
from ptx_values import Bits, cut, halves, number, raw, width

Mask = np.ndarray  # [threads] bool: which threads execute an instruction

GLOBAL = 1 << 40  # tensors begin at multiples of this address

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
    "cp.async.commit",
    "wgmma.fence",
    "wgmma.commit",
    "wgmma.wait",
    "mbarrier.init",
    "mbarrier.arrive",
    "barrier.cluster.arrive",
)


class Access(NamedTuple):
    """An access of some threads to one memory.

    Attributes:
        memory: [size] uint8.
        threads: the numbers of the threads.
        places: the address in the memory for each of them.
    """

    memory: Bits
    threads: np.ndarray
    places: np.ndarray

    def bytes(self, count: int) -> np.ndarray:
        """Returns the indices of bytes from each place on; one behind the end is an IndexError.

        A GPU accesses so many bytes at once only at a multiple of their number, or of 16.
        """
        assert not (self.places % min(count, 16)).any(), f"{count} bytes at {self.places}"
        return self.places[:, None] + np.arange(count)


Step = Callable[[Words, Words, Mask], None]


class Machine:
    """Runs one program of a grid after the other. The tensors stay, registers do not."""

    def __init__(
        self,
        ptx: str,
        threads: int,
        parameters: dict[str, int],
        tensors: dict[int, Bits],
        grid: int,
    ) -> None:
        self.program = parse(ptx)
        self.threads = threads
        self.parameters = parameters
        self.tensors = tensors
        # the names that have one value for all threads; parameters have an address each
        self.places_of_parameters = {name: i + 1 for i, name in enumerate(parameters)}
        self.fixed = self.program.places | self.places_of_parameters | {"%nctaid.x": grid}

    def run(self, program: int) -> None:
        """Runs a program that is no cluster's, or a cluster's only one."""
        run_together([self], program)

    def begin(self, program: int, cluster: list["Machine"]) -> Iterator[None]:
        """Runs a program, up to each barrier of its cluster."""
        self.cluster = cluster
        self.registers: dict[str, Bits] = {"%tid.x": np.arange(self.threads, dtype=np.uint64)}
        self.fixed["%ctaid.x"] = program
        self.fixed["%cluster_ctarank"] = cluster.index(self)
        self.shared = np.full(1 << 18, 0xCD, np.uint8)
        place = 0
        while self.program.statements[place].operation != "ret":
            statement = self.program.statements[place]
            place += 1
            mask = self.mask(statement.predicate)
            if statement.operation.startswith("barrier.cluster.wait"):
                yield
            elif statement.operation.startswith("bra"):
                assert mask.all() or not mask.any(), "some threads take a branch, and others do not"
                if mask.all():
                    place = self.program.labels[statement.operands[0]]
            elif not statement.operation.startswith(SKIPPED):
                self.step(statement.operation.split("."), statement.operands, mask)

    def mask(self, predicate: str) -> Mask:
        if not predicate:
            return np.ones(self.threads, bool)
        mask = self.get(predicate.lstrip("!")).astype(bool)
        return ~mask if predicate.startswith("!") else mask

    def get(self, name: str) -> Bits:
        """Returns the bits of a register, a fixed name or a literal."""
        if name in self.registers:
            return self.registers[name]
        if name in self.fixed:
            value = self.fixed[name]
        elif name.startswith("%"):  # never written: half of a word that nothing reads
            value = 0xBAD
        elif name.startswith("0f"):  # the bits of a float
            value = int(name[2:], 16)
        else:
            value = int(name, 0)
        return np.full(self.threads, value & (2**64 - 1), np.uint64)

    def put(self, name: str, bits: Bits, mask: Mask) -> None:
        old = self.registers.get(name, np.full(self.threads, 0xBAD, np.uint64))
        self.registers[name] = np.where(mask, bits, old)

    def values(self, names: Words, kind: str) -> list[np.ndarray]:
        return [number(self.get(name), kind) for name in names]

    def step(self, parts: Words, names: Words, mask: Mask) -> None:
        """Executes an instruction. The first operand is usually the target."""
        kind = parts[-1]
        name = "ld_param" if parts[:2] == ["ld", "param"] else parts[0]
        result_kind = WIDE[kind] if "wide" in parts else kind
        special: Step | None = getattr(self, f"do_{name}", None)
        if special:
            special(parts, names, mask)
        elif name == "setp":
            a, b = self.values(names[1:], kind)
            compared = COMPARE[parts[1]](a, b)
            self.put(names[0], compared.astype(np.uint64), mask)
        elif name in ("fma", "mad"):
            a, b = self.values(names[1:3], kind)
            added = number(self.get(names[3]), result_kind)
            self.put(names[0], raw(a * b + added, result_kind), mask)
        elif kind == "s16x2":
            a, b = (self.get(one) for one in names[1:])
            half = np.uint64(16)
            low = raw(INTEGER[name](a, b), "s16")
            high = raw(INTEGER[name](a >> half, b >> half), "s16")
            self.put(names[0], low | high << half, mask)
        elif parts[:2] == ["mul", "hi"]:
            a, b = self.values(names[1:], kind)
            self.put(names[0], raw(a * b >> width(kind), kind), mask)
        else:
            a, b = self.values(names[1:], "u1" if kind == "pred" else kind)
            self.put(names[0], raw(INTEGER[name](a, b), result_kind), mask)

    def do_ld_param(self, _: Words, names: Words, mask: Mask) -> None:
        name = names[1].strip("[] ")
        if name not in self.parameters:  # an address that was chosen among those of parameters
            (place,) = np.unique(self.get(name.removesuffix("+0")))
            name = list(self.parameters)[int(place) - 1]
        self.put(names[0], np.uint64(self.parameters[name]), mask)

    def accesses(self, operand: str, parts: Words, mask: Mask) -> Iterator[Access]:
        """Yields the memory that an address operand leads to, for some threads at a time."""
        name, _, offset = operand.strip("[] ").partition("+")
        address = self.get(name.strip()).astype(np.int64) + int(offset or 0)
        if "shared" in parts:
            yield Access(self.shared, np.flatnonzero(mask), address[mask])
            return
        if "shared::cluster" in parts:
            for rank in np.unique(address[mask] >> 32):
                threads = np.flatnonzero(mask & (address >> 32 == rank))
                place = address[threads] & 0xFFFFFFFF
                yield Access(self.cluster[int(rank)].shared, threads, place)
            return
        for tensor in np.unique(address[mask] // GLOBAL):
            threads = np.flatnonzero(mask & (address // GLOBAL == tensor))
            yield Access(self.tensors[int(tensor)], threads, address[threads] % GLOBAL)

    def do_ld(self, parts: Words, names: Words, mask: Mask) -> None:
        targets = listed(names[0])
        size = width(parts[-1]) // 8
        loaded = np.zeros((self.threads, size * len(targets)), np.uint64)
        for access in self.accesses(names[1], parts, mask):
            loaded[access.threads] = access.memory[access.bytes(loaded.shape[1])]
        shifts = np.arange(size, dtype=np.uint64) * np.uint64(8)
        for i, target in enumerate(targets):
            bits = loaded[:, i * size : (i + 1) * size] << shifts
            self.put(target, bits.sum(axis=1, dtype=np.uint64), mask)

    def do_st(self, parts: Words, names: Words, mask: Mask) -> None:
        shifts = np.arange(width(parts[-1]) // 8, dtype=np.uint64) * np.uint64(8)
        columns = [self.get(one)[:, None] >> shifts for one in listed(names[1])]
        stored = np.concatenate(columns, axis=1).astype(np.uint8)
        for access in self.accesses(names[0], parts, mask):
            access.memory[access.bytes(stored.shape[1])] = stored[access.threads]

    def do_cp(self, _: Words, names: Words, mask: Mask) -> None:
        """Executes cp.async, which copies zeros where the last operand is 0."""
        size = int(names[2])
        target = self.get(names[0].strip("[] ")).astype(np.int64)
        asked = self.get(names[3]) > 0
        copied = np.zeros((self.threads, size), np.uint8)
        for access in self.accesses(names[1], ["global"], asked):
            copied[access.threads] = access.memory[access.bytes(size)]
        self.shared[target[mask, None] + np.arange(size)] = copied[mask]

    def do_mbarrier(self, parts: Words, names: Words, mask: Mask) -> None:
        """Executes mbarrier.try_wait: what it waits for has happened."""
        assert parts[1] == "try_wait"
        self.put(names[0], np.uint64(1), mask)

    def do_mapa(self, _: Words, names: Words, mask: Mask) -> None:
        """Finds an address in another program's shared memory: here its number is the high half."""
        address = self.get(names[1]) | self.get(names[2]) << np.uint64(32)
        self.put(names[0], address, mask)

    def do_mov(self, parts: Words, names: Words, mask: Mask) -> None:
        """Moves a register, or joins several into one, or divides one into several."""
        targets = listed(names[0])
        sources = listed(names[1])
        count = width(parts[-1]) // max(len(targets), len(sources))
        whole = np.uint64(0)
        for i, source in enumerate(sources):
            whole = whole + (self.get(source) << np.uint64(count * i))
        if len(targets) == 1:
            self.put(targets[0], whole, mask)
            return
        for i, target in enumerate(targets):
            self.put(target, cut(whole >> np.uint64(count * i), count), mask)

    def do_neg(self, parts: Words, names: Words, mask: Mask) -> None:
        (value,) = self.values(names[1:], parts[-1])
        self.put(names[0], raw(-value, parts[-1]), mask)

    def do_ex2(self, parts: Words, names: Words, mask: Mask) -> None:
        (value,) = self.values(names[1:], parts[-1])
        with np.errstate(over="ignore"):  # infinity, as the GPU has it
            self.put(names[0], raw(np.exp2(value), parts[-1]), mask)

    def do_div(self, parts: Words, names: Words, mask: Mask) -> None:
        a, b = self.values(names[1:], parts[-1])
        if parts[-1] == "f32":
            self.put(names[0], raw(a / b, "f32"), mask)
            return
        quotient = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
        result = quotient if parts[0] == "div" else a - quotient * b
        self.put(names[0], raw(result, parts[-1]), mask)

    do_rem = do_div

    def do_shl(self, parts: Words, names: Words, mask: Mask) -> None:
        value = number(self.get(names[1]), parts[-1])
        count = np.minimum(number(self.get(names[2]), "u32"), 63)
        shifted = value << count if parts[0] == "shl" else value >> count
        self.put(names[0], raw(shifted, parts[-1]), mask)

    do_shr = do_shl

    def do_selp(self, _: Words, names: Words, mask: Mask) -> None:
        a, b, condition = (self.get(one) for one in names[1:])
        self.put(names[0], np.where(condition, a, b), mask)

    def do_not(self, parts: Words, names: Words, mask: Mask) -> None:
        self.put(names[0], cut(~self.get(names[1]), width(parts[-1])), mask)

    def do_cvt(self, parts: Words, names: Words, mask: Mask) -> None:
        target, source = parts[-2:]
        values = self.values(names[1:], source)
        if source == "f16":
            half, _ = halves(np.repeat(self.get(names[1]), 1), "f16")
            self.put(names[0], raw(half, "f32"), mask)
            return
        if source != "f32":
            self.put(names[0], raw(values[0], target), mask)
            return
        dtype = torch.bfloat16 if "bf16" in target or "f16" not in target else torch.float16
        total = np.int64(0)
        for i, value in enumerate(reversed(values)):  # the last of two is the low half
            rounded = torch.from_numpy(value).float().to(dtype).view(torch.int16)
            total = total + (rounded.numpy().view(np.uint16).astype(np.int64) << 16 * i)
        self.put(names[0], raw(total, "u32"), mask)

    def do_lop3(self, _: Words, names: Words, mask: Mask) -> None:
        assert names[4] == "0xea"
        a, b, c = (self.get(one) for one in names[1:4])
        self.put(names[0], cut((a & b) | c, 32), mask)

    def do_prmt(self, _: Words, names: Words, mask: Mask) -> None:
        """Puts bytes of two registers together; a selector of 8 or more takes a byte's sign."""
        source = cut(self.get(names[1]), 32) | self.get(names[2]) << np.uint64(32)
        total = np.uint64(0)
        for i in range(4):
            selector = int(names[3].rstrip("U"), 0) >> 4 * i & 15
            byte = source >> np.uint64(8 * (selector & 7)) & np.uint64(255)
            if selector & 8:
                byte = np.where(byte > 127, 255, 0).astype(np.uint64)
            total = total | byte << np.uint64(8 * i)
        self.put(names[0], total, mask)

    def do_bfe(self, _: Words, names: Words, mask: Mask) -> None:
        self.put(names[0], cut(self.get(names[1]) >> self.get(names[2]), int(names[3])), mask)

    def do_shfl(self, parts: Words, names: Words, mask: Mask) -> None:
        """Takes registers of other lanes: of one by number, or of the one across ("bfly")."""
        lanes = np.arange(self.threads)
        segment = int(names[3], 0) >> 8 & 31
        asked = (self.get(names[2]) & np.uint64(31)).astype(np.int64)
        sources = lanes // 32 * 32 + (lanes % 32 & segment | asked & ~segment)
        if "bfly" in parts:
            sources = lanes ^ int(names[2])
        self.put(names[0], self.get(names[1])[sources], mask)

    def left(self, operand: str, kind: str) -> np.ndarray:
        """Returns a left operand, [warps, 16, 16], which PTX places in lanes (g, t)."""
        g, t = np.divmod(np.arange(32), 4)
        found = np.zeros((self.threads // 32, 16, 16))
        for i, one in enumerate(listed(operand)):
            for half, values in enumerate(halves(self.get(one), kind)):
                found[:, g + i % 2 * 8, 2 * t + i // 2 * 8 + half] = values.reshape(-1, 32)
        return found

    def put_sums(
        self, found: np.ndarray, targets: Words, before: list[np.ndarray], mask: Mask
    ) -> None:
        """Adds a product, [warps, 16, columns], to sums in registers, which PTX places in lanes."""
        g, t = np.divmod(np.arange(32), 4)
        for i, (target, old) in enumerate(zip(targets, before, strict=True)):
            sums = found[:, g + i // 2 % 2 * 8, 2 * t + i // 4 * 8 + i % 2].reshape(-1)
            self.put(target, raw(old + sums, "f32"), mask)

    def do_mma(self, parts: Words, names: Words, mask: Mask) -> None:
        """Multiplies by m16n8k16, all operands in registers."""
        g, t = np.divmod(np.arange(32), 4)
        right = np.zeros((self.threads // 32, 16, 8))
        for i, one in enumerate(listed(names[2])):
            for half, values in enumerate(halves(self.get(one), parts[-2])):
                right[:, 2 * t + i * 8 + half, g] = values.reshape(-1, 32)
        before = self.values(listed(names[3]), "f32")
        self.put_sums(self.left(names[1], parts[-2]) @ right, listed(names[0]), before, mask)

    def do_wgmma(self, parts: Words, names: Words, mask: Mask) -> None:
        """Multiplies by m64nNk16.

        The right operand is in shared memory: rows of 128 bytes, whose pieces are swizzled.
        """
        (descriptor,) = np.unique(self.get(names[2]))
        assert descriptor >> np.uint64(16) == 0x400000400001
        columns = int(parts[4].removeprefix("m64n").removesuffix("k16"))
        k = np.arange(16)[:, None]
        n = np.arange(columns)
        place = (int(descriptor) & 0x3FFF) * 16 + n * 128 + k * 2
        place ^= (place >> 7 & 7) << 4
        bits = self.shared[place] + self.shared[place + 1].astype(np.uint64) * np.uint64(256)
        right, _ = halves(bits.ravel(), parts[-1])
        targets = listed(names[0])
        if self.mask(names[3]).all():
            before = self.values(targets, "f32")
        else:  # the first product begins the sums
            before = [np.zeros(self.threads) for _ in targets]
        self.put_sums(self.left(names[1], parts[-1]) @ right.reshape(16, -1), targets, before, mask)


def run_together(machines: list[Machine], first: int) -> None:
    """Runs the programs of a cluster."""
    running = [one.begin(first + i, machines) for i, one in enumerate(machines)]
    while running:
        still = [one for one in running if next(one, running) is None]
        assert not still or len(still) == len(running)
        running = still
