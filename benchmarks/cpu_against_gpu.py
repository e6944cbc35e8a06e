"""Bytes of the CPU path against those of bitsandbytes CUDA, on values whose quotients often lie on
a cut.

    python -m benchmarks.cpu_against_gpu [--elements 1073741824] [--json FILE]

Every dtype and data type gets that many elements, nested and plain, in equal shares of six kinds:
numbers of few bits, which tie with cuts, and random ones. One machine computes both sides.
"""

from collections.abc import Callable

import torch
from bitsandbytes import functional

from benchmarks.running import DEVICE, parser, save
from nf4conv.codec import cpu
from nf4conv.format.layout import block_count

CHUNK = 1 << (26 if DEVICE == "cuda" else 12)  # without a GPU the script is only tried
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def integers(low: int, high: int) -> torch.Tensor:
    return torch.randint(low, high, (CHUNK,), device=DEVICE).float()


def scales(low: int, high: int) -> torch.Tensor:
    """A power of two for each block of 64."""
    return torch.exp2(
        torch.randint(low, high, (CHUNK // 64,), device=DEVICE).float()
    ).repeat_interleave(64)


def few() -> torch.Tensor:
    palette = torch.randn(CHUNK // 64, 5, device=DEVICE).bfloat16().float()
    return palette.gather(1, torch.randint(5, (CHUNK // 64, 64), device=DEVICE)).view(-1)


def heavy() -> torch.Tensor:
    """Student's t with 3 degrees of freedom: a normal number over the root of a mean of three
    squares.
    """
    mean = sum(torch.randn(CHUNK, device=DEVICE).square() for _ in range(3)) / 3
    return torch.randn(CHUNK, device=DEVICE) * torch.rsqrt(mean) * 0.02


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "odd numbers times powers of two": lambda: (
        (2 * integers(-8, 8) + 1) * torch.exp2(integers(-9, -1))
    ),
    "integers up to 24": lambda: integers(-24, 25),
    "multiples of 1/24": lambda: integers(-24, 25) / 24 * scales(-12, 4),
    "five values a block": few,
    "normal": lambda: torch.randn(CHUNK, device=DEVICE) * 0.02,
    "heavy tails": heavy,
}


def differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    return int(
        (found.view(-1).view(torch.uint8) != expected.cpu().view(-1).view(torch.uint8)).sum()
    )


def compare(weight: torch.Tensor, quant_type: str) -> dict[str, int]:
    """Differing bytes of codes, absmax, nested codes, nested absmax and offset."""
    theirs, plain = functional.quantize_4bit(
        weight, quant_type=quant_type, compress_statistics=False
    )
    _, nested = functional.quantize_4bit(weight, quant_type=quant_type, compress_statistics=True)
    host = weight.cpu()
    packed = torch.empty(host.numel() // 2, dtype=torch.uint8)
    absmax = torch.empty(block_count(host.numel(), 64))
    cpu.quantize_blocks(host, packed, absmax, quant_type, 64)
    codes = torch.empty(absmax.numel(), dtype=torch.uint8)
    nested_absmax = torch.empty(block_count(absmax.numel(), 256))
    offset = cpu.compress_absmax(absmax, codes, nested_absmax)
    return {
        "packed": differing(packed, theirs),
        "absmax": differing(absmax, plain.absmax),
        "nested codes": differing(codes, nested.absmax),
        "nested absmax": differing(nested_absmax, nested.state2.absmax),
        "offset": differing(offset, nested.offset),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--elements", type=int, default=1 << 30)
    chosen = options.parse_args()
    torch.manual_seed(0)
    rows = []
    for name, dtype in DTYPES.items():
        counts = {(kind, quant_type): [0, {}] for kind in KINDS for quant_type in ("nf4", "fp4")}
        chunks = -(-chosen.elements // CHUNK)
        for number in range(-(-chunks // len(KINDS)) * len(KINDS)):
            kind = list(KINDS)[number % len(KINDS)]
            weight = KINDS[kind]().to(dtype)
            for quant_type in ("nf4", "fp4"):
                entry = counts[kind, quant_type]
                entry[0] += weight.numel()
                for part, count in compare(weight, quant_type).items():
                    entry[1][part] = entry[1].get(part, 0) + count
        for (kind, quant_type), (elements, found) in counts.items():
            rows.append(
                {"dtype": name, "quant_type": quant_type, "values": kind, "elements": elements}
                | found
            )
        total = sum(sum(found.values()) for _, found in counts.values())
        elements = sum(elements for elements, _ in counts.values()) // 2
        print(f"{name}: {elements:,} each of NF4 and FP4, {total} bytes differ", flush=True)
        save(chosen, cpu=torch.backends.cpu.get_cpu_capability(), rows=rows)


if __name__ == "__main__":
    main()
