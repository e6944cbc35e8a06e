"""Products with packed weights on a GPU at few to hundreds of rows, beside bitsandbytes and cuBLAS.

    python -m benchmarks.linear_rows [--json FILE] [--commit HASH]

Device times in µs: medians of graph replays over weights that exceed the L2 cache, the providers
taking turns, bfloat16 x, nested NF4 in blocks of 64. "not Hopper" is nf4conv with the kernels that
it takes on other GPUs. "decode + cuBLAS" decodes the whole weight first.
"""

import json
from functools import partial

import bitsandbytes
import torch
from bitsandbytes import functional

import nf4conv
from benchmarks.codec_gpu import L2_BYTES, graph, parsed, take_turns, versions
from nf4conv.codec import linear
from nf4conv.codec.kernels.product import choosing, launches

SHAPES = (
    (4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672), (6144, 4096), (5120, 5120),
    (11008, 4096),
)  # fmt: skip
ROWS = (1, 4, 8, 16, 32, 33, 48, 64, 96, 128, 256, 512)
HOPPER = launches.CAPABILITY


def main() -> None:
    arguments = parsed(__doc__)
    rows = []
    for n, k in SHAPES:
        for one in measured(n, k):
            print(one, flush=True)
            rows.append(one)
    if arguments.json:
        record = {"versions": versions(arguments.commit), "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


def measured(n: int, k: int) -> list[dict[str, object]]:
    count = max(2, -(-2 * L2_BYTES // (n * k // 2)))
    weights = [torch.randn(n, k, device="cuda").bfloat16().mul_(0.02) for _ in range(count)]
    packed = [
        functional.quantize_4bit(one, quant_type="nf4", compress_statistics=True) for one in weights
    ]
    dense = weights[: max(2, -(-2 * L2_BYTES // (2 * n * k)))]
    found = []
    for m in ROWS:
        x = torch.randn(m, k, device="cuda").bfloat16()
        ours = [partial(nf4conv.linear_4bit, x, *pair) for pair in packed]
        theirs = [partial(bitsandbytes.matmul_4bit, x, data.t(), state) for data, state in packed]
        products = [partial(torch.nn.functional.linear, x, one) for one in dense]
        timed = {"bitsandbytes": graph(theirs), "cuBLAS": graph(products)}
        for name, capability in (("nf4conv", HOPPER), ("not Hopper", 0)):
            launches.CAPABILITY = capability  # type: ignore[misc]
            choosing.prepare_multiply.cache_clear()
            linear._weights.clear()
            if name == "nf4conv" or m <= launches.SHAPES[-1].rows:
                timed[name] = graph(ours)
        counts = {"cuBLAS": len(dense)}
        times = take_turns(timed)
        row: dict[str, object] = {"shape": [n, k], "rows": m}
        for name, value in times.items():
            row[name] = round(value / counts.get(name, len(packed)), 2)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
