"""The codec on the CPU beside bitsandbytes' own, in one process, taking turns.

    python -m benchmarks.codec_cpu [--rounds 7] [--threads 1 2] [--output
    benchmarks/results/codec_cpu.json]

Each round runs every contestant once on the same 8192 × 4096 weight, and a ratio is the median of
the rounds' ratios: whatever else the machine does meanwhile slows both. Before anything is timed,
results are held to the reference and to bitsandbytes: NF4 codes are equal, and so are the decoded
values. The load average goes on record: a figure from a busy machine is no figure.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from bitsandbytes import functional

from nf4conv.codec import reference
from nf4conv.codec.ops import dequantize_4bit, quantize_4bit

SHAPE = (8192, 4096)
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass
class Row:
    """One operation on one kind of weight: million elements a second, medians, and paired ratios.

    Attributes:
        threads: that torch, and so either codec, may use.
        slowest_ratio: the least of the rounds' ratios of nf4conv to bitsandbytes.
        fastest_ratio: the greatest.
    """

    threads: int
    operation: str
    dtype: str
    quant_type: str
    nf4conv: float
    bitsandbytes: float
    copy: float
    ratio: float
    slowest_ratio: float
    fastest_ratio: float


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    names: tuple[str, str, str],
    contestants: tuple[Callable[[], object], ...],
    elements: int,
    rounds: int,
) -> Row:
    """Time nf4conv, bitsandbytes and a copy in turns, `rounds` times after one unmeasured round."""
    for run in contestants:
        run()
    taken = [[seconds(run) for run in contestants] for _ in range(rounds)]
    ratios = [theirs / ours for ours, theirs, _ in taken]
    ours, theirs, copy = (
        elements / statistics.median(column) / 1e6 for column in zip(*taken, strict=True)
    )
    return Row(
        torch.get_num_threads(),
        *names,
        ours,
        theirs,
        copy,
        statistics.median(ratios),
        min(ratios),
        max(ratios),
    )


def check(weight: torch.Tensor, quant_type: str) -> None:
    packed, state = quantize_4bit(weight, quant_type, 64, double_quant=False)
    expected = torch.empty_like(packed)
    reference.quantize_blocks(
        weight.view(-1), expected.view(-1), torch.empty_like(state.absmax), quant_type, 64
    )
    assert torch.equal(packed, expected)
    theirs, their_state = functional.quantize_4bit(
        weight, quant_type=quant_type, compress_statistics=False
    )
    if quant_type == "nf4":
        differing = (packed.view(-1) != theirs.view(-1)).count_nonzero().item()
        assert differing <= (8 if weight.dtype == torch.float32 else 0), differing
    assert torch.equal(
        dequantize_4bit(theirs, their_state), functional.dequantize_4bit(theirs, their_state)
    )


def rows_for(dtype: str, quant_type: str, rounds: int) -> list[Row]:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    check(weight[:512], quant_type)
    rows = []
    for nested in (False, True):
        mark = "nested" if nested else "plain"
        packed, state = functional.quantize_4bit(
            weight, quant_type=quant_type, compress_statistics=nested
        )
        quantize = (
            lambda nested=nested: quantize_4bit(weight, quant_type, 64, nested),
            lambda nested=nested: functional.quantize_4bit(
                weight, quant_type=quant_type, compress_statistics=nested
            ),
            weight.clone,
        )
        decode = (
            lambda packed=packed, state=state: dequantize_4bit(packed, state),
            lambda packed=packed, state=state: functional.dequantize_4bit(packed, state),
            weight.clone,
        )
        search = (
            lambda nested=nested: quantize_4bit(weight, quant_type, 64, nested, "search"),
            *quantize[1:],
        )
        for verb, contestants in (
            ("quantize", quantize),
            ("search", search),
            ("dequantize", decode),
        ):
            rows.append(
                compare((f"{verb} {mark}", dtype, quant_type), contestants, weight.numel(), rounds)
            )
            print(format_row(rows[-1]), flush=True)
    return rows


def format_row(row: Row) -> str:
    speeds = f"{row.nf4conv:7.0f} | {row.bitsandbytes:7.0f} | {row.copy:6.0f}"
    ratio = f"{row.ratio:5.2f} ({row.slowest_ratio:.2f} … {row.fastest_ratio:.2f})"
    case = f"{row.threads} | {row.operation:17} | {row.dtype:4} | {row.quant_type}"
    return f"| {case} | {speeds} | {ratio} |"


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()})
    )
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/codec_cpu.json"))
    arguments = parser.parse_args()
    machine = {
        "cpu": cpu_model(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processors": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "shape": SHAPE,
        **{name: version(name) for name in ("torch", "numpy", "bitsandbytes")},
    }
    print(json.dumps(machine))
    print(
        "million elements a second, medians; ratio nf4conv : bitsandbytes, median (least … "
        "greatest)"
    )
    print("| threads | operation | type | code | nf4conv | bitsandbytes | copy | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for quant_type in ("nf4", "fp4"):
                rows += rows_for(dtype, quant_type, arguments.rounds)
    machine["load_average_after"] = os.getloadavg()[0]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "rows": [asdict(row) for row in rows]}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
