"""Products with packed weights on a GPU against bitsandbytes, Unsloth, GemLite and cuBLAS, side by
side in one run.

    python -m benchmarks.matmul_gpu [--json FILE [--svg FILE]] [--commit HASH]

Device times are medians of graph replays, the providers taking turns, bfloat16 x, nested NF4
weights that together exceed the L2 cache several times. The floor is packed codes and absmax at
4200 GB/s. "cuBLAS" multiplies a bfloat16 weight, "decode + cuBLAS" is our decode kernel before it.
GemLite multiplies linear 4-bit codes in groups of 64, which is less work than NF4, with the
configurations it ships for an H100; Unsloth's product is of one row. Tokens per second are those of
a Llama-shaped model of random weights, one token at a time, eagerly, with a static cache.
"""

import statistics
import time
from functools import partial
from pathlib import Path

import bitsandbytes
import torch
from bitsandbytes import functional

import nf4conv
from benchmarks.codec_gpu import print_table, row, wall
from benchmarks.plot_codec import document, text
from benchmarks.records import parser, save, versions
from benchmarks.timing import L2_BYTES, Call, graph, take_turns

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (8192, 28672))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLOURS = {
    "nf4conv": "#1b6ca8",
    "bitsandbytes": "#c9c9c9",
    "GemLite": "#e0a458",
    "Unsloth": "#8fb8de",
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--svg", type=Path, help="where to draw the rows")
    arguments = options.parse_args()
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        rows += product_rows(*shape)
    rows += wall_rows()
    tokens = tokens_per_second()
    print_table(rows)
    print("tokens per second:", tokens)
    record = {"versions": versions(arguments.commit), "rows": rows, "tokens_per_second": tokens}
    save(record, arguments.json)
    if arguments.svg:
        arguments.svg.write_text(drawing(rows, str(record["versions"]["gpu"])))


def moved_bytes(n: int, k: int) -> int:
    """Packed codes, nested absmax and its absmax."""
    return int(n * k * (1 / 2 + 1 / 64 + 4 / 64 / 256))


def product_rows(n: int, k: int) -> list[dict[str, object]]:
    moved = moved_bytes(n, k)
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16).mul_(0.02)
        for _ in range(-(-4 * L2_BYTES // moved))
    ]
    packed = [
        functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
        for weight in weights
    ]
    linear = [gemlite_layer(weight) for weight in weights]
    dense = weights[: -(-4 * L2_BYTES // (2 * n * k))]
    scratch = torch.empty_like(weights[0])
    rows = []
    for m in ROWS:
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        calls: dict[str, list[Call]] = {
            "nf4conv": [partial(nf4conv.linear_4bit, x, *pair) for pair in packed],
            "bitsandbytes": [
                partial(bitsandbytes.matmul_4bit, x, data.t(), state) for data, state in packed
            ],
            "cuBLAS": [partial(torch.matmul, x, weight.T) for weight in dense],
            "decode + cuBLAS": [partial(decoded_product, x, *pair, scratch) for pair in packed],
            "Unsloth": [call for pair in packed if (call := unsloth(x, *pair))],
            "GemLite": [partial(layer, x) for layer in linear if layer and m in (1, 16, 64)],
        }
        timed = {name: graph(some) for name, some in calls.items() if some}
        for name, value in take_turns(timed).items():
            rows.append(row(f"product, {m} rows", (n, k), name, value / len(calls[name]), moved))
        rows.append(row(f"product, {m} rows", (n, k), "floor", moved / 4200e3, moved))
    return rows


def decoded_product(
    x: torch.Tensor, packed: torch.Tensor, state: object, scratch: torch.Tensor
) -> torch.Tensor:
    return torch.matmul(x, nf4conv.dequantize_4bit(packed, state, scratch).T)


def unsloth(x: torch.Tensor, packed: torch.Tensor, state: object) -> Call | None:
    try:
        from unsloth.kernels import nf4_gemv
    except ImportError:
        return None
    if x.shape[0] > 1:
        return None
    nested = state.state2
    decoding = state.absmax, nested.code, nested.absmax, state.offset, state.code, 64, 256
    return partial(nf4_gemv.gemv_nf4, x[None], packed, *decoding, state.shape, x.dtype)


def gemlite_layer(weight: torch.Tensor) -> Call | None:
    """A layer of the same size; None without the package, or a configuration for the shape: tuning
    takes minutes.
    """
    try:
        import gemlite
    except ImportError:
        return None
    n, k = weight.shape
    if n * k > 1 << 26:
        return None
    gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    kind = gemlite.DType.BF16
    layer = gemlite.GemLiteLinear(4, 64, k, n, input_dtype=kind, output_dtype=kind)
    groups = weight.view(-1, 64).float()
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round().clamp(0, 15).to(torch.uint8).view(n, k)
    layer.pack(codes, scale.view(n, -1).bfloat16(), (-low / scale).view(n, -1).bfloat16(), None)
    return layer


def wall_rows() -> list[dict[str, object]]:
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, Call | None] = {
        "nf4conv": partial(nf4conv.linear_4bit, x, packed, state),
        "bitsandbytes": partial(bitsandbytes.matmul_4bit, x, packed.t(), state),
        "cuBLAS": partial(torch.matmul, x, weight.T),
        "Unsloth": unsloth(x, packed, state),
    }
    with torch.no_grad():
        timed = take_turns({name: partial(wall, call) for name, call in calls.items() if call})
    return [
        row("wall a call, 1 row", (4096, 4096), name, value, moved_bytes(4096, 4096))
        for name, value in timed.items()
    ]


def tokens_per_second(layers: int = 16, tokens: int = 48) -> dict[str, float]:
    """Measures a model with bitsandbytes' layers, then the same model after patch_linear_4bit."""
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    shape = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    config = LlamaConfig(num_hidden_layers=layers, vocab_size=32000, **shape)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, packed_layer(linear))

    def decode() -> float:
        cache = StaticCache(config=config, max_cache_len=tokens + 8)
        token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        times = []
        with torch.no_grad():
            for place in range(tokens):
                start = time.perf_counter()
                position = torch.tensor([place], device="cuda")
                out = model(
                    token,
                    past_key_values=cache,
                    cache_position=position,
                    position_ids=position[None],
                )
                token = out.logits[:, -1:].argmax(-1)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        return 1 / statistics.median(times[tokens // 4 :])

    found = {"bitsandbytes": decode()}
    nf4conv.patch_linear_4bit(model)
    found["nf4conv"] = decode()
    return {name: round(value, 1) for name, value in found.items()}


def packed_layer(linear: torch.nn.Linear) -> torch.nn.Module:
    options = {"quant_type": "nf4", "compress_statistics": True}
    layer = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, **options
    )
    layer.weight = bitsandbytes.nn.Params4bit(
        linear.weight.data.cpu(), requires_grad=False, **options
    )
    return layer.cuda()


def drawing(rows: list[dict[str, object]], gpu: str) -> str:
    """Speed relative to cuBLAS in bfloat16, which reads four times the bytes: a group of bars for
    each shape and m.
    """
    times: dict[tuple[str, str], dict[str, float]] = {}
    for one in rows:
        if str(one["kernel"]).startswith("product"):
            group = times.setdefault((str(one["shape"]), str(one["kernel"])[9:]), {})
            group[str(one["provider"])] = float(str(one["microseconds"]))
    left, top, height, wide = 60, 60, 240, 60
    width = left + wide * len(times) + 20
    parts = [
        text(left, 20, f"Speed of x · Wᵀ relative to cuBLAS in bfloat16 (the line), one {gpu}", 14),
    ]
    for index, (name, colour) in enumerate(COLOURS.items()):
        parts.append(
            f'<rect x="{left + index * 120}" y="32" width="12" height="12" fill="{colour}"/>'
        )
        parts.append(text(left + index * 120 + 18, 42, name))
    for index, ((shape, label), group) in enumerate(times.items()):
        x = left + index * wide
        for place, (name, colour) in enumerate(COLOURS.items()):
            if name in group:
                tall = height / 3 * group["cuBLAS"] / group[name]
                parts.append(
                    f'<rect x="{x + place * 12}" y="{top + height - tall:.1f}" width="11" '
                    f'height="{tall:.1f}" '
                    f'fill="{colour}"/>'
                )
        parts += [text(x, top + height + 14, label), text(x, top + height + 30, shape, 9)]
    line = top + height - height / 3
    parts.append(f'<line x1="{left - 6}" y1="{line}" x2="{width - 10}" y2="{line}" stroke="#222"/>')
    return document(width, top + height + 60, parts)


if __name__ == "__main__":
    main()
