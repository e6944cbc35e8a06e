"""Runs the PTX of product/panels without a GPU, as emulator.py runs that of other products.

    python panels_emulator.py [RANDOM_CASES [SEED]]

This is a program of its own, because Triton cannot compile in a process whose kernels are
interpreted.
"""

import random
import sys

import numpy as np
import torch
from panels_compiling import compiled, needs_of
from products import assert_close_to_exact, packed_weight
from ptx_machine import GLOBAL, Machine, Mask, run_together
from ptx_program import Words
from ptx_values import Bits, cut

from nf4conv.codec.quant_state import QuantState, decoding_of
from nf4conv.inference.kernels.product.panels.plans import CLUSTERS, PANELS, Plan
from nf4conv.inference.kernels.product.panels.prepare import TYPES, table_for
from nf4conv.inference.kernels.product.panels.tiles import TENSOR_MAP

POINTERS = 6
"""Tensors before the tensor map among the kernel's arguments."""

MAP_WORDS = 16


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
        """Executes cp.async.bulk.tensor of 64 k, some rows, and two pieces of k."""
        assert {"bulk", "tensor", "3d"} <= set(parts)
        source, _, coordinates = names[1].strip("[] ").partition(",")
        for thread in np.flatnonzero(mask):
            assert self.get(source)[thread] == self.places_of_parameters[TENSOR_MAP]
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


def spilled(cluster: int) -> list[str]:
    """Returns the panels whose kernels keep registers in memory, in clusters of a size."""
    found = []
    for panel in PANELS:
        for dtype in TYPES:
            plan = Plan(panel, cluster, 1)
            if needs_of(compiled(plan, dtype).asm["cubin"]).spilled > 0:
                found.append(f"{plan} {dtype}")
    return found


def multiply(x: torch.Tensor, packed: torch.Tensor, state: QuantState, plan: Plan) -> torch.Tensor:
    """Multiplies with panel_kernel, as its clusters one after the other."""
    panel, cluster, splits = plan
    decoding = decoding_of(state)
    m, k = x.shape
    n = state.shape[0]
    dtype = x.dtype if splits == 1 else torch.float32
    out = torch.full((splits, m, n), float("nan"), dtype=dtype)
    table, norm = table_for(panel, x.dtype, x.device, decoding.quant_type)
    buffers: dict[int, Bits] = {}
    for i, tensor in enumerate((out, packed, *decoding.pointers(), table), start=1):
        buffers[i] = tensor.reshape(-1).view(torch.uint8).numpy().copy()
    pointers = [i * GLOBAL for i in buffers]
    norm_bits = int(np.float32(norm).view(np.uint32))
    shift = (decoding.blocksize // 64).bit_length() - 1
    given = [*pointers[:POINTERS], *([0] * MAP_WORDS), *pointers[POINTERS:]]
    given += [m, n, k, splits, shift, norm_bits, 0, 0]
    parameters = {f"panel_kernel_param_{i}": value for i, value in enumerate(given)}
    assert list(parameters)[POINTERS] == TENSOR_MAP
    clusters = -(-m // panel.columns) * -(-n // panel.rows) * splits
    ptx = compiled(plan, x.dtype, capped=False).asm["ptx"]
    for first in range(0, clusters * cluster, cluster):
        machines: list[Machine] = []
        for _ in range(cluster):
            machine = TensorMachine(ptx, 2 * panel.rows, parameters, buffers, clusters * cluster)
            machine.x, machine.columns = x, panel.columns
            machines.append(machine)
        run_together(machines, first)
    found = torch.from_numpy(buffers[1]).view(dtype).view(out.shape)
    return found.sum(0, dtype=torch.float32).to(x.dtype)


def run(
    plan: Plan, m: int, n: int, k: int, blocksize: int, quant_type: str, dtype: torch.dtype
) -> None:
    """Compares a product with the exact one."""
    packed, state = packed_weight(n, k, quant_type, blocksize, plan.panel.nested)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    assert_close_to_exact(multiply(x, packed, state, plan), x, packed, state)
    print(plan, m, n, k, blocksize, quant_type, dtype, flush=True)


def run_all_panels() -> None:
    """Multiplies with every panel, in clusters of all sizes: what hangs over an edge, one turn of a
    program and many, odd numbers of blocks.
    """
    sizes = (
        # rows of W, k, blocksize, splits; a program has a turn at least
        (150, 320, 64, 1), (131, 704, 128, 1), (257, 448, 4096, 1), (150, 1344, 256, 2),
        (129, 704, 512, 1), (300, 832, 64, 1), (1, 640, 1024, 1), (130, 1216, 64, 1),
        (254, 576, 2048, 1), (5, 1344, 64, 2), (128, 640, 64, 1), (6, 128, 64, 1),
    )  # fmt: skip
    for number, one in enumerate(PANELS):
        n, k, blocksize, splits = sizes[number % len(sizes)]
        cluster = min(CLUSTERS[number % len(CLUSTERS)], -(-k // 128) // splits)
        panel = one.plain if number % 3 == 1 else one
        # the last row of a tile, the one behind, and few rows
        m = (one.columns, one.columns + 1, one.columns - 15)[number // 2 % 3]
        dtype = torch.float16 if number % 4 == 2 else torch.bfloat16
        quant_type = "fp4" if number % 5 == 3 else "nf4"
        run(Plan(panel, cluster, splits), m, n, k, blocksize, quant_type, dtype)


def run_random(count: int, seed: int) -> None:
    """Multiplies random shapes by random plans."""
    chance = random.Random(seed)
    for _ in range(count):
        panel = chance.choice(PANELS)
        panel = chance.choice((panel, panel.plain))
        k = 64 * chance.randint(1, 24)
        parts = [(cluster, splits) for cluster in CLUSTERS for splits in (1, 2, 3)]
        parts = [one for one in parts if one[0] * one[1] <= -(-k // 128)]
        plan = Plan(panel, *chance.choice(parts))
        m, n = chance.choice((1, 33, chance.randint(1, 512))), chance.randint(1, 400)
        blocksize = 64 << chance.randint(0, 6)
        quant_type = chance.choice(("nf4", "fp4"))
        run(plan, m, n, k, blocksize, quant_type, chance.choice(list(TYPES)))


if __name__ == "__main__":
    run_all_panels()
    if len(sys.argv) > 1:
        run_random(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
