"""Times other ways to compute products with packed weights beside the way that nf4conv chooses now.

A script lists cases, a product each, with candidates: other parameters of a kernel, or another
kernel. `main` then does all the rest:

1. compiles all candidates in as many processes as there are cores; these need no GPU;
2. compares each candidate's result with the present one;
3. times in turns, as CUDA graphs over weights that exceed the L2 cache: the present way, nn.Linear
   in bfloat16, and the candidates;
4. writes what it has found after each case, since a lent GPU may be taken back.

With --dry-run it ends after the first step, which a machine without a GPU can do.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch
from torch.nn import functional
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import nf4conv
from benchmarks.records import parser, save, versions
from benchmarks.timing import Call, Turns, copies_beyond_l2, graph
from nf4conv.codec.quant_state import Addresses, Form, decoding_of
from nf4conv.inference.kernels.product import choosing
from nf4conv.inference.kernels.product.launches import Product
from nf4conv.system.cores import usable_cores

MultiplyAll = Callable[[torch.Tensor, Sequence[Addresses]], Sequence[torch.Tensor]]
"""Multiplies x with one weight or several: x, their addresses → x · Wᵀ of each."""

LONGEST_COMPILING: Final = 180
"""Seconds; what is not compiled then is compiled when it is needed."""

BANDWIDTH: Final = 4.1e6
"""Bytes per µs that an H200 reads, as benchmarks/floor.py measured: what a floor is worked out of.
"""


@dataclass(frozen=True)
class Candidate:
    """Another way to compute the product of a case.

    Attributes:
        name: under which it is reported.
        prepare: takes a device, compiles, and returns what multiplies.
    """

    name: str
    prepare: Callable[[torch.device], MultiplyAll]


@dataclass(frozen=True)
class Case:
    """A product that is timed in several ways, x in bfloat16 and the weights in nested NF4.

    Attributes:
        rows: of x.
        heights: rows of the weight, or of each of several that are multiplied with the same x.
        k: columns.
        candidates: what is timed beside the present way.
        blocksize: of the weights.
    """

    rows: int
    heights: tuple[int, ...]
    k: int
    candidates: tuple[Candidate, ...]
    blocksize: int = 64

    @property
    def name(self) -> str:
        heights = " + ".join(map(str, self.heights))
        return f"{self.rows} rows, {heights} x {self.k}, blocks of {self.blocksize}"

    @property
    def form(self) -> Form:
        return Form("nf4", self.blocksize, True)

    @property
    def floor(self) -> float:
        """Returns the µs that reading the weights once takes."""
        blocks = sum(self.heights) * self.k / self.blocksize
        packed_bytes = sum(self.heights) * self.k / 2
        return (packed_bytes + blocks * (1 + 4 / 256)) / BANDWIDTH


def alone(product: Product) -> MultiplyAll:
    """Returns the product with one weight as that with a list of one."""

    def multiply(x: torch.Tensor, weights: Sequence[Addresses]) -> list[torch.Tensor]:
        return [product(x, weights[0])]

    return multiply


def main(description: str | None, cases: Sequence[Case]) -> None:
    """Does what the command line asks for with the cases, the most important one first."""
    options = parser(description)
    options.add_argument("--seconds", type=float, default=560, help="when to end, from the start")
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("--dry-run", action="store_true", help="only compile, without a GPU")
    arguments = options.parse_args()
    ends = time.time() + arguments.seconds
    cases = [case for case in cases if arguments.only in case.name]
    failures = compile_all(cases)
    count = sum(len(case.candidates) for case in cases)
    print(f"{count} candidates of {len(cases)} cases, {len(failures)} do not compile", flush=True)
    for name, error in failures.items():
        print(f"  {name}: {error}", flush=True)
    if not arguments.dry_run:
        _measure_all(cases, failures, ends, arguments.json, arguments.commit)
    elif failures:
        raise SystemExit(1)


def compile_all(cases: Sequence[Case]) -> dict[str, str]:
    """Compiles all candidates into Triton's cache on disk, in as many processes as there are cores.

    Returns:
        For each candidate that failed, by its full name, why.
    """
    tasks = [(case, candidate) for case in cases for candidate in case.candidates]
    _waiting[:] = tasks
    names = [full_name(case, candidate) for case, candidate in tasks]
    processes = min(len(tasks), len(usable_cores()))
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        work = pool.map_async(_compile, range(len(tasks)), chunksize=1)
        try:
            errors = work.get(LONGEST_COMPILING)
        except multiprocessing.TimeoutError:
            print("compiling in other processes takes too long", flush=True)
            return {}
    return {name: error for name, error in zip(names, errors, strict=True) if error}


_waiting: list[tuple[Case, Candidate]] = []
"""What forked processes are to compile: they find it here, and need no pickle."""


def full_name(case: Case, candidate: Candidate) -> str:
    return f"{case.name}: {candidate.name}"


def _compile(number: int) -> str:
    """Compiles one of `_waiting`; returns why that failed, or nothing."""
    _, candidate = _waiting[number]
    with like_h200() as device:
        try:
            candidate.prepare(device)
        except Exception as error:  # noqa: BLE001 - one that fails is a result too
            return f"{type(error).__name__}: {error}"[:300]
    return ""


class _NoGpu:
    """Tells Triton of an H200 that is not there: kernels are compiled for it, and never launched.

    Attributes:
        launcher_cls: what Triton makes to launch a kernel.
        utils: what Triton loads machine code with.
    """

    def __init__(self) -> None:
        self.launcher_cls = _NoLauncher
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232448},
            load_binary=lambda *_: (0, 0, 0, 0, 1024),
        )

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class _NoLauncher:
    """Stands for what Triton makes to launch a kernel."""

    global_scratch_size = 0
    profile_scratch_size = 0
    launch_cooperative_grid = False
    launch_pdl = False

    def __init__(self, *_: object) -> None: ...

    def launch(self, *_: object) -> None:
        raise RuntimeError("there is no GPU")

    __call__ = launch


@contextmanager
def like_h200() -> Iterator[torch.device]:
    """Lets kernels be prepared as for an H200, without one; tables are made on the CPU.

    Yields:
        The device to prepare them for.
    """
    properties = SimpleNamespace(multi_processor_count=132)
    with (
        mock.patch.object(driver, "_active", _NoGpu()),
        mock.patch("torch.cuda.is_available", return_value=False),
        mock.patch("torch.cuda.device_count", return_value=1),
        mock.patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
        mock.patch("torch.cuda.device", return_value=nullcontext()),
    ):
        yield torch.device("cpu", 0)


def _measure_all(
    cases: Sequence[Case],
    failures: dict[str, str],
    ends: float,
    file: Path | None,
    commit: str | None,
) -> None:
    """Measures the cases one after the other, as long as there is time."""
    device = torch.device("cuda", torch.cuda.current_device())
    record: dict[str, Any] = {"versions": versions(commit), "not compiled": failures, "cases": []}
    longest = 0.0
    for case in cases:
        began = time.time()
        if began + longest > ends:
            print(f"no time for {case.name}", flush=True)
            continue
        found = measured(case, failures, device)
        record["cases"].append(found)
        print(json.dumps(found), flush=True)
        save(record, file)
        longest = max(longest, time.time() - began)


def measured(case: Case, failures: dict[str, str], device: torch.device) -> dict[str, Any]:
    """Returns the µs of the present way, of nn.Linear and of each candidate, or what is wrong with
    it; the floor; and what is fastest but for nn.Linear.
    """
    size = sum(case.heights) * case.k
    weights = [_packed(case, device) for _ in range(copies_beyond_l2(size // 2))]
    addresses = [[decoding_of(state).addresses(codes) for codes, state in one] for one in weights]
    x = torch.randn(case.rows, case.k, device=device).bfloat16()
    present = _present(case, device)
    expected = present(x, addresses[0])
    dense = [
        [torch.randn(n, case.k, device=device).bfloat16() for n in case.heights]
        for _ in range(copies_beyond_l2(2 * size))
    ]

    def checked(candidate: Candidate) -> list[Call]:
        multiply = candidate.prepare(device)
        check(multiply(x, addresses[0]), expected)
        return [partial(multiply, x, one) for one in addresses]

    turns = Turns(graph)
    turns.add("present", [partial(present, x, one) for one in addresses])
    turns.add("nn.Linear", [partial(_multiply_dense, x, one) for one in dense])
    for candidate in case.candidates:
        if full_name(case, candidate) not in failures:
            turns.attempt(candidate.name, partial(checked, candidate))
    times = {name: round(value, 2) for name, value in turns.measured().items()}
    best = min((name for name in times if name != "nn.Linear"), key=times.__getitem__)
    found: dict[str, Any] = {"case": case.name, "floor": round(case.floor, 2), "best": best}
    return found | {"µs": times, "wrong": turns.wrong}


def _packed(case: Case, device: torch.device) -> list[tuple[torch.Tensor, Any]]:
    """Returns one weight of each height."""
    found = []
    for n in case.heights:
        weight = torch.randn(n, case.k, device=device).bfloat16().mul_(0.02)
        found.append(nf4conv.quantize_4bit(weight, blocksize=case.blocksize))
    return found


def _present(case: Case, device: torch.device) -> MultiplyAll:
    """Returns what nf4conv multiplies with now."""
    matrices = tuple(choosing.Matrix(n, case.k, case.form, 16) for n in case.heights)
    x_shape = torch.Size((case.rows, case.k))
    if len(matrices) == 1:
        single = choosing.prepare_multiply(x_shape, torch.bfloat16, device, matrices[0])
        return alone(lambda x, weight: single(x, weight, None))
    multiply = choosing.prepare_group(x_shape, torch.bfloat16, device, matrices)
    return lambda x, weights: multiply(x, weights, [None] * len(matrices))


def _multiply_dense(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [functional.linear(x, one) for one in weights]


def check(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless results are as close as roundings of bfloat16 leave them.

    Kernels round weights, sums and results at different places: each value may differ by 2 % of
    its own size and of the root mean square of all, which is ten times what is expected.
    """
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            raise ValueError(f"{one.dtype} of {list(one.shape)}, not {list(other.shape)}")
        usual = other.float()
        size = usual.abs() + usual.square().mean().sqrt()
        excess = ((one.float() - usual).abs() / size).max().item()
        if not excess <= 0.02:  # NaN is not
            raise ValueError(f"results differ by {excess:.3f}")
