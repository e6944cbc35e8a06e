"""Finds the fastest plan of product/panels for 33 to 512 rows of x on a Hopper GPU, beside cuBLAS
and what is chosen today, above all where products take longer than they should.

    python -m benchmarks.panel_plans --json FILE [--seconds 300] [--most 16] [--shapes 4096x4096 …]
        [--rows 128 …] [--variants N] [--processes N] [--dry-run] [--commit HASH]

benchmarks/panels says which plans may be fast. Many processes compile and check them first, in the
order of the sizes that they are for. Then one process times them: medians
of graph replays over weights that exceed the L2 cache, all in turns with cuBLAS and with today's
choice, bfloat16 x, nested NF4 in blocks of 64. The file is whole after each size. Sizes whose aim
is missed come first, the others follow while there is time.

Without a GPU, --dry-run compiles for one and looks for spilled registers, then runs all the rest
with small weights and nf4conv's product on the CPU in the place of every plan.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional

import nf4conv
from benchmarks.panels.candidates import WAYS, candidates, estimated, goal, name_of, present
from benchmarks.panels.checking import MOST_ERROR, check_all, relative_error, variant_of
from benchmarks.records import parser, save, versions
from benchmarks.timing import Call, Timer, Turns, copies_beyond_l2, graph
from nf4conv.codec.quant_state import Decoding, QuantState, decoding_of
from nf4conv.inference.kernels.product.panels.plans import Plan
from nf4conv.inference.kernels.product.panels.prepare import prepare_panel
from nf4conv.system.cores import usable_cores

RESULTS: Final = Path(__file__).parent / "results/linear_rows_h200.json"

CHECKING_SHARE: Final = 0.6
"""Of the time, at most, for compiling and checking."""

ROUNDS: Final = 7

LAUNCHES: Final = 24
"""Launches of a graph at least."""


@dataclass
class Case:
    """A size to measure.

    Attributes:
        n, k: rows and columns of the weight.
        m: rows of x.
        missed: True if today's choice takes longer than it should.
        tried: the plans.
    """

    n: int
    k: int
    m: int
    missed: bool
    tried: list[Plan] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.n}×{self.k}, {self.m} rows"


@dataclass
class Weight:
    """A packed weight. `decoding` holds what kernels read."""

    packed: torch.Tensor
    state: QuantState
    decoding: Decoding


Multiply = Callable[[torch.Tensor, Weight], torch.Tensor]


@dataclass
class Weights:
    """Weights of one size, packed and not, that together exceed the L2 cache."""

    packed: list[Weight]
    dense: list[torch.Tensor]


class OnGpu:
    """Makes weights and products, and times calls."""

    device = torch.device("cuda", 0)

    def weights(self, n: int, k: int) -> Weights:
        packed = [self.weight(n, k) for _ in range(copies_beyond_l2(n * k // 2))]
        dense = [
            torch.randn(n, k, device=self.device).bfloat16().mul_(0.02)
            for _ in range(copies_beyond_l2(2 * n * k))
        ]
        return Weights(packed, dense)

    def weight(self, n: int, k: int) -> Weight:
        packed, state = nf4conv.quantize_4bit(torch.randn(n, k, device=self.device).mul_(0.02))
        return Weight(packed, state, decoding_of(state))

    def product(self, plan: Plan, x: torch.Tensor, weight: Weight) -> Multiply:
        n = weight.state.shape[0]
        form = weight.decoding.form()
        multiply = prepare_panel(x.shape, x.dtype, self.device, n, form, plan)
        return lambda x, weight: multiply(x, weight.decoding.addresses(weight.packed))

    def timer(self, calls: list[Call]) -> Timer:
        return graph(calls, least=LAUNCHES)


class Rehearsal(OnGpu):
    """Does the same on a CPU: weights are small, and a product is nf4conv's own."""

    device = torch.device("cpu")

    def weights(self, n: int, k: int) -> Weights:
        n, k = 64 * max(n // 2048, 1), 64 * max(k // 2048, 1)
        dense = [torch.randn(n, k).bfloat16() for _ in range(2)]
        return Weights([self.weight(n, k) for _ in range(2)], dense)

    def product(self, *_: object) -> Multiply:
        return lambda x, weight: nf4conv.linear_4bit(x, weight.packed, weight.state)

    def timer(self, calls: list[Call]) -> Timer:
        def time_once() -> float:
            start = time.perf_counter()
            for call in calls:
                call()
            return (time.perf_counter() - start) * 1e6

        return time_once


def main() -> None:
    arguments = parsed()
    start = time.time()
    ends = start + arguments.seconds
    cases = cases_of(arguments)
    variants = list(dict.fromkeys(variant_of(one) for case in cases for one in case.tried))
    variants = variants[: arguments.variants]
    say(f"{len(cases)} sizes, {len(variants)} variants")
    checking_ends = start + CHECKING_SHARE * arguments.seconds
    with tempfile.TemporaryDirectory() as folder:
        checked = check_all(variants, arguments.processes, checking_ends, Path(folder), say)
    say(f"{time.time() - start:.0f} s")
    tools = Rehearsal() if arguments.dry_run else OnGpu()
    record: dict[str, Any] = {"versions": versions(arguments.commit), "sizes": []}
    record["checked"] = {name_of(one): wrong for one, wrong in checked.items()}
    weights, size = None, None
    for case in cases:
        if time.time() > ends:
            say("the time is over")
            break
        if size != (case.n, case.k):
            weights = None  # frees memory for the next
            size = (case.n, case.k)
            weights = tools.weights(*size)
        case.tried = [one for one in case.tried if checked.get(variant_of(one)) == ""]
        row = measured(case, weights, tools)
        record["sizes"].append(row)
        save(record, arguments.json)
        say(summary(row))
    met = [one for one in record["sizes"] if one["missed"] and one["best"]["ratio"] <= one["goal"]]
    missed = [one for one in record["sizes"] if one["missed"]]
    say(f"{len(met)} of {len(missed)} sizes that missed their aim would meet it")


def parsed() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=300, help="for all, about")
    options.add_argument("--most", type=int, default=16, help="plans for each size")
    options.add_argument("--shapes", nargs="*", default=[], help="only these, such as 4096x14336")
    options.add_argument("--rows", nargs="*", type=int, default=[], help="only these")
    options.add_argument("--variants", type=int, help="compile no more kernels than these")
    options.add_argument("--processes", type=int, default=len(usable_cores()))
    options.add_argument("--dry-run", action="store_true", help="do without a GPU")
    arguments = options.parse_args()
    if arguments.json is None:
        options.error("--json says where to write what is found")
    if not arguments.dry_run and not torch.cuda.is_available():
        options.error("there is no GPU: use --dry-run")
    return arguments


def cases_of(arguments: argparse.Namespace) -> list[Case]:
    """Returns the sizes that are asked for: those whose aim is missed first, most of them first,
    those of one weight together.
    """
    known = json.loads(RESULTS.read_text())["rows"]
    cases = []
    for row in known:
        n, k = row["shape"]
        m = row["rows"]
        asked = not arguments.shapes or f"{n}x{k}" in arguments.shapes
        if m > 32 and asked and m in (arguments.rows or [m]):
            cases.append(Case(n, k, m, row["nf4conv"] / row["cuBLAS"] > goal(m)))

    def missed_of(case: Case) -> int:
        return sum(one.missed for one in cases if (one.n, one.k) == (case.n, case.k))

    cases.sort(key=lambda one: (not one.missed, -missed_of(one), one.n, one.k, one.m))
    for case in cases:
        case.tried = candidates(case.m, case.n, case.k, arguments.most)
    return cases


def measured(case: Case, weights: Weights, tools: OnGpu) -> dict[str, Any]:
    """Times a size: cuBLAS, today's choice, and other plans."""
    today = present(case.m, case.n, case.k)
    k = weights.packed[0].state.shape[1]
    x = torch.randn(case.m, k, device=tools.device).bfloat16()
    product = tools.product(today, x, weights.packed[0])
    expected = product(x, weights.packed[0])

    def checked(plan: Plan) -> list[Call]:
        multiply = tools.product(plan, x, weights.packed[0])
        error = relative_error(multiply(x, weights.packed[0]), expected)
        if not error <= MOST_ERROR:
            raise ValueError(f"differs from today's by {error:.2e}")
        return [partial(multiply, x, one) for one in weights.packed]

    turns = Turns(tools.timer)
    turns.add("cuBLAS", [partial(functional.linear, x, one) for one in weights.dense])
    turns.add("today", [partial(product, x, one) for one in weights.packed])
    for one in case.tried:
        turns.attempt(name_of(one), partial(checked, one))
    times = turns.measured(ROUNDS)
    best = min((name for name in times if name != "cuBLAS"), key=lambda name: times[name])
    estimates = {
        name_of(one): estimated(one, case.m, case.n, case.k) for one in (today, *case.tried)
    }
    return {
        "shape": [case.n, case.k],
        "rows": case.m,
        "missed": case.missed,
        "goal": goal(case.m),
        "today's plan": name_of(today),
        "best": {"name": best, "ratio": round(times[best] / times["cuBLAS"], 3)},
        "µs": {name: round(value, 2) for name, value in times.items()},
        "estimated µs": {name: round(value, 1) for name, value in estimates.items()},
        "wrong": turns.wrong,
    }


def summary(row: dict[str, Any]) -> str:
    """Returns a line about a size: what is fastest, and the fastest of each way."""
    times = row["µs"]
    n, k = row["shape"]
    base = times["cuBLAS"]
    ways = []
    for way in WAYS:
        of_way = [(value, name) for name, value in times.items() if name.startswith(way)]
        if of_way:
            value, name = min(of_way)
            ways.append(f"{name} {value} ({value / base:.2f})")
    met = "met" if row["best"]["ratio"] <= row["goal"] else "missed"
    today = f"today {times['today']} ({times['today'] / base:.2f})"
    wrong = f"; {len(row['wrong'])} wrong" if row["wrong"] else ""
    head = f"{n}×{k} {row['rows']}: cuBLAS {base}, {today}, goal {row['goal']} {met}"
    return f"{head} | {' | '.join(ways)}{wrong}"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
