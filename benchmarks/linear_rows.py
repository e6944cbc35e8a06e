"""Products with packed weights on a GPU at few to hundreds of rows, beside bitsandbytes and cuBLAS.

    python -m benchmarks.linear_rows [--json FILE] [--commit HASH]

Device times in µs: medians of graph replays over weights that exceed the L2 cache, the providers
taking turns, bfloat16 x, nested NF4 in blocks of 64. "not Hopper" is nf4conv with the kernels that
it takes on other GPUs. Then blocks of 32, and several weights apart and in one launch.
"""

from functools import partial

import bitsandbytes
import torch
from bitsandbytes import functional

import nf4conv
from benchmarks.records import parser, save
from benchmarks.timing import Timer, copies_beyond_l2, graph, take_turns
from nf4conv.inference import linear
from nf4conv.inference.kernels.product import choosing, launches

SHAPES = (
    (4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672), (6144, 4096), (5120, 5120),
    (11008, 4096),
)  # fmt: skip
FEW_SHAPES = SHAPES[:3]
FEW_ROWS = (1, 2, 4, 8, 16, 32)
ROWS = (1, 4, 8, 16, 32, 33, 48, 64, 96, 128, 256, 512)
HOPPER = launches.CAPABILITY


def main() -> None:
    chosen = parser(__doc__).parse_args()
    record: dict[str, list[dict[str, object]]] = {"rows": [], "blocks of 32": []}

    def keep(part: str, found: list[dict[str, object]]) -> None:
        for one in found:
            print(one, flush=True)
        record[part] += found
        save(chosen, **record)

    for n, k in SHAPES:
        keep("rows", measured(n, k))
    for n, k in FEW_SHAPES:
        keep("blocks of 32", measured(n, k, FEW_ROWS, 32))


def measured(
    n: int, k: int, row_counts: tuple[int, ...] = ROWS, blocksize: int = 64
) -> list[dict[str, object]]:
    count = copies_beyond_l2(n * k // 2)
    weights = [torch.randn(n, k, device="cuda").bfloat16().mul_(0.02) for _ in range(count)]
    packed = [
        functional.quantize_4bit(
            one, blocksize=blocksize, quant_type="nf4", compress_statistics=True
        )
        for one in weights
    ]
    dense = weights[: copies_beyond_l2(2 * n * k)]
    found = []
    for m in row_counts:
        x = torch.randn(m, k, device="cuda").bfloat16()
        ours = [partial(nf4conv.linear_4bit, x, *pair) for pair in packed]
        theirs = [partial(bitsandbytes.matmul_4bit, x, data.t(), state) for data, state in packed]
        products = [partial(torch.nn.functional.linear, x, one) for one in dense]
        timers: dict[str, Timer] = {"bitsandbytes": graph(theirs), "cuBLAS": graph(products)}
        counts = {"bitsandbytes": len(theirs), "cuBLAS": len(products)}
        for name, capability in (("not Hopper", 0), ("nf4conv", HOPPER)):
            launches.CAPABILITY = capability  # type: ignore[misc]
            choosing.prepare_multiply.cache_clear()
            linear._weights.clear()
            if name == "nf4conv" or m <= launches.SHAPES[-1].rows:
                timers[name] = graph(ours)
                counts[name] = len(ours)
        row: dict[str, object] = {"shape": [n, k], "rows": m}
        for name, value in take_turns(timers).items():
            row[name] = round(value / counts[name], 2)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
