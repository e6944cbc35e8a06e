"""Runs the kernels of benchmarks/panels without a GPU, as emulator.py runs the package's.

    python candidates_emulator.py [RANDOM_CASES [SEED]]

This is a program of its own, because Triton cannot compile in a process whose kernels are
interpreted.
"""

import random
import sys

import numpy as np
import torch
from emulator import GLOBAL, Bits, Machine, Mask, Words, arranged, cut, run_together
from products import assert_close_to_exact, packed_weight

from benchmarks.panels.compiling import TYPES, compiled
from benchmarks.panels.costs import SCALED, STREAMS, Candidate, Way, fits, panels
from nf4conv.codec.kernels import tables
from nf4conv.codec.kernels.product.panels import plans
from nf4conv.codec.quant_state import QuantState, decoding_of

MAP_PARAMETER = 6
"""The number of the parameter that a tensor map begins with, counted from 0."""

STREAM_PROGRAMS = 7
"""Programs that share all turns."""

ORDERED_X = 15
"""The number of the tensor that x in tiles is."""


class TensorMachine(Machine):
    """Also copies tiles by a tensor map: of the x that it is given.

    Attributes:
        x: [m, k] 16-bit values.
        columns: rows of x of a tile.
    """

    x: torch.Tensor
    columns: int

    def do_cvta(self, _: Words, names: Words, mask: Mask) -> None:
        self.put(names[0], self.get(names[1]), mask)

    def do_cp(self, parts: Words, names: Words, mask: Mask) -> None:
        """Also executes cp.async.bulk.tensor of 64 k, some rows, and two pieces of k."""
        if "tensor" not in parts:
            super().do_cp(parts, names, mask)
            return
        assert "3d" in parts
        source, _, coordinates = names[1].strip("[] ").partition(",")
        for thread in np.flatnonzero(mask):
            assert self.get(source)[thread] == MAP_PARAMETER + 1  # as Machine numbers them
            target = int(self.get(names[0].strip("[] "))[thread])
            columns = coordinates.strip("{} ").split(",")
            begin, row, piece = (int(self.get(one.strip())[thread]) for one in columns)
            assert begin == 0
            self.copy_tile(target, row, piece)

    def copy_tile(self, target: int, row: int, piece: int) -> None:
        """Copies a tile, swizzled; what is not in x becomes zeros."""
        assert target % 1024 == 0
        tile = torch.zeros(2, self.columns, 64, dtype=torch.int16)
        rows = self.x[row : row + self.columns].view(torch.int16)
        for half in range(2):
            found = rows[:, 64 * (piece + half) : 64 * (piece + half + 1)]
            tile[half, : found.shape[0], : found.shape[1]] = found
        data = tile.view(-1).numpy().view(np.uint8)
        address = np.arange(data.size)
        address ^= (address >> 7 & 7) << 4
        self.shared[target + address] = data

    def do_mbarrier(self, parts: Words, names: Words, mask: Mask) -> None:
        if parts[1] != "inval":
            super().do_mbarrier(parts, names, mask)

    def do_prmt(self, parts: Words, names: Words, mask: Mask) -> None:
        """Also takes selectors, below 8, from a register."""
        if names[3][0].isdigit():
            super().do_prmt(parts, names, mask)
            return
        source = cut(self.get(names[1]), 32) | self.get(names[2]) << np.uint64(32)
        picks = self.get(names[3])
        total = np.zeros(self.threads, np.uint64)
        for i in range(4):
            selector = picks >> np.uint64(4 * i) & np.uint64(15)
            assert (selector < 8).all()
            byte = source >> selector * np.uint64(8) & np.uint64(255)
            total |= byte << np.uint64(8 * i)
        self.put(names[0], total, mask)


def table_of(way: Way, quant_type: str, dtype: torch.dtype) -> tuple[torch.Tensor, float]:
    """Returns the table for x of a dtype, and what scales are multiplied with."""
    cpu = torch.device("cpu")
    if dtype == torch.float16 and way not in SCALED:
        return tables.value_table(quant_type, cpu), 1.0
    values = dtype if way in SCALED else torch.float16
    return tables.pair_table(quant_type, values, cpu), 1 / tables.MULTIPLES[quant_type, values]


def multiply(
    x: torch.Tensor, packed: torch.Tensor, state: QuantState, candidate: Candidate
) -> torch.Tensor:
    """Multiplies with a candidate's kernel, as its clusters one after the other."""
    shape, cluster, splits = candidate.plan
    stream = candidate.way in STREAMS
    decoding = decoding_of(state)
    m, k = x.shape
    n = state.shape[0]
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.full((splits, m, n), float("nan"), dtype=dtype)
    table, norm = table_of(candidate.way, decoding.quant_type, x.dtype)
    clusters = -(-m // shape.columns) * -(-n // shape.rows) * splits
    tensors = [out, packed, *decoding.pointers(), table]
    if stream:
        clusters = min(STREAM_PROGRAMS, clusters * -(-k // 128))
        sums = torch.full((clusters, shape.rows * shape.columns), float("nan"))
        tensors += [sums, torch.zeros(clusters, dtype=torch.int32)]
    buffers: dict[int, Bits] = {}
    for i, tensor in enumerate(tensors, start=1):
        buffers[i] = tensor.reshape(-1).view(torch.uint8).numpy().copy()
    pointers = [i * GLOBAL for i in buffers]
    x_address = 0
    if candidate.way == "brisk":
        buffers[ORDERED_X] = arranged(x, shape).numpy()
        x_address = ORDERED_X * GLOBAL
    norm_bits = int(np.float32(norm).view(np.uint32))
    shift = (decoding.blocksize // 64).bit_length() - 1
    parts = [] if stream else [cluster, splits]
    given = [*pointers[:MAP_PARAMETER], x_address, *([0] * 15), *pointers[MAP_PARAMETER:]]
    given += [m, n, k, *parts, shift, norm_bits, 0, 0]
    name = "stream_kernel" if stream else "candidate_kernel"
    parameters = {f"{name}_param_{i}": value for i, value in enumerate(given)}
    ptx = compiled(candidate, x.dtype, capped=False).asm["ptx"]
    for first in range(0, clusters * cluster, cluster):
        machines: list[Machine] = []
        for _ in range(cluster):
            machine = TensorMachine(ptx, 2 * shape.rows, parameters, buffers, clusters * cluster)
            machine.x, machine.columns = x, shape.columns
            machines.append(machine)
        run_together(machines, first)
    if stream:
        assert not buffers[len(tensors)].any()  # all flags are set back
    found = torch.from_numpy(buffers[1]).view(dtype).view(out.shape)
    return found.sum(0, dtype=torch.float32).to(x.dtype)


def run(
    candidate: Candidate,
    m: int,
    n: int,
    k: int,
    blocksize: int,
    quant_type: str,
    dtype: torch.dtype,
) -> None:
    """Compares a product with the exact one."""
    nested = candidate.plan.panel.nested
    packed, state = packed_weight(n, k, quant_type, blocksize, nested)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    assert_close_to_exact(multiply(x, packed, state, candidate), x, packed, state)
    print(candidate, m, n, k, blocksize, quant_type, nested, dtype, flush=True)


def run_random(count: int, seed: int) -> None:
    """Multiplies random shapes by random candidates."""
    chance = random.Random(seed)
    ways: tuple[Way, ...] = ("brisk", "straight", "scaled", "stream", "shared")
    for _ in range(count):
        way = chance.choice(ways)
        shape = chance.choice([one for one in panels() if fits(way, plans.Plan(one, 1, 1))])
        shape = chance.choice((shape, shape.plain))
        k = 64 * chance.randint(1, 24)
        parts = [(1, 1), (2, 1), (1, 3), (2, 2), (3, 1), (4, 1), (5, 2)]
        most = 1 if way in STREAMS else -(-k // 128)
        parts = [one for one in parts if one[0] * one[1] <= most]
        plan = plans.Plan(shape, *chance.choice(parts))
        m, n = chance.randint(33, 512), chance.randint(1, 400)
        blocksize = 64 << chance.randint(0, 6)
        quant_type = chance.choice(("nf4", "fp4"))
        dtype = chance.choice(list(TYPES))
        run(Candidate(way, plan), m, n, k, blocksize, quant_type, dtype)


if __name__ == "__main__":
    wide = plans.PANELS[-1]
    for chosen in (
        (Candidate("straight", plans.Plan(plans.NARROW, 1, 1)), 40, 150, 320, 64, "nf4"),
        (Candidate("brisk", plans.Plan(plans.NARROW.plain, 1, 2)), 63, 150, 320, 128, "fp4"),
        (Candidate("straight", plans.Plan(wide, 2, 2)), 270, 151, 832, 256, "nf4"),
    ):
        run(*chosen, torch.bfloat16)
    narrow = next(one for one in panels() if (one.groups, one.columns) == (4, 64))
    for way, shape, cluster in (
        ("scaled", plans.PANELS[1].plain, 2), ("scaled", narrow, 2), ("stream", plans.NARROW, 1),
    ):  # fmt: skip
        plan = plans.Plan(shape, cluster, 1)
        run(Candidate(way, plan), 70, 130, 448, 64, "nf4", torch.bfloat16)
    run(Candidate("straight", plans.Plan(plans.TALL.plain, 2, 1)), 130, 300, 448, 128, "fp4",
        torch.float16)  # fmt: skip
    if len(sys.argv) > 1:
        run_random(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
