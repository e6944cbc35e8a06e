"""Models with 4-bit layers on a GPU, as they run: eagerly, compiled, in CUDA graphs, in training.

    python -m benchmarks.linear_models [--json FILE] [--commit HASH]

A Llama of eight layers of the 8B shape with random weights, in bfloat16, with bitsandbytes' layers
and with the same layers after `patch_linear_4bit`. Each is prepared in a process of its own, all at
once; then they are measured in turns, three times each, and each is first once. Times are medians
of calls that are awaited. "host" is what a call costs the caller over 56 different layers in turn,
on a queue that is never full. "kernels of" is the sum of the times of a step's kernels, whatever
the host did: kernels that overlap count in full. A kind that could not be measured is "failed".
"""

import multiprocessing
import queue
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import bitsandbytes
import torch
from torch.profiler import ProfilerActivity, profile

import nf4conv
from benchmarks.records import parser, save

LAYERS = 8
KINDS = ("bf16", "bitsandbytes", "nf4conv")
MODES = (
    ("eager", 1), ("eager", 16), ("graph", 1), ("graph", 16), ("default", 1),
    ("reduce-overhead", 1), ("reduce-overhead", 16), ("prefill", 128), ("prefill", 512),
)  # fmt: skip
TRAINED_TOKENS = 2048
HOST_ROWS = (1, 4, 16, 64, 128, 512)
SHAPES = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096),
          (4096, 14336))  # fmt: skip

ROUNDS = len(KINDS)
WARM_UPS = 3
PROFILED = ("reduce-overhead, 1", "reduce-overhead, 16", "prefill, 128", "prefill, 512", "train")
LONGEST = 120
"""Seconds to wait for the others at most."""

Step = Callable[[], object]
Measure = Callable[[], list[float]]


def main() -> None:
    chosen = parser(__doc__).parse_args()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(KINDS))
    results = context.Queue()
    processes = [context.Process(target=run, args=(kind, barrier, results)) for kind in KINDS]
    for process in processes:
        process.start()
    found: dict[str, dict[str, object]] = {}
    while len(found) < len(KINDS):
        some_run = any(process.is_alive() for process in processes)
        try:
            kind, result = results.get(timeout=5)
        except queue.Empty:
            if some_run:
                continue
            break
        found[kind] = result
        save(chosen, layers=LAYERS, results=found)
    for process in processes:
        process.join()
    for name in sorted(set().union(*found.values())):
        print(name, {kind: found[kind].get(name) for kind in found}, flush=True)
    failed = [kind for kind in KINDS if kind not in found or "failed" in found[kind]]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(kind: str, barrier: Any, results: Any) -> None:
    """Prepares a kind of model and its layers, and measures them in turns with the other kinds."""
    warnings.simplefilter("ignore")
    found: dict[str, object] = {}
    try:
        measures, found = prepare_all(kind)
        times: dict[str, list[float]] = {name: [] for name in measures}
        for turn in range(ROUNDS):
            for other in KINDS[turn:] + KINDS[:turn]:
                barrier.wait(LONGEST)
                if other == kind:
                    for name, measure in measures.items():
                        times[name] += measure()
        found |= {name: round(statistics.median(several), 3) for name, several in times.items()}
        for other in KINDS:
            barrier.wait(LONGEST)
            if other == kind:
                found |= kernels_of(kind, measures)
    except Exception as error:  # noqa: BLE001 - the others are waiting
        barrier.abort()
        found["failed"] = f"{type(error).__name__}: {error}"[:300]
    results.put((kind, found))


def prepare_all(kind: str) -> tuple[dict[str, Measure], dict[str, object]]:
    """Prepares all that is measured of a kind of model.

    Returns:
        By name, what measures a few times and returns the times; and by name, what cannot run.
    """
    failed: dict[str, object] = {}
    measures: dict[str, Measure] = {}
    model = make_model(kind)
    for mode, count in MODES:
        step = prepared(model, mode, count)
        if isinstance(step, str):
            failed[f"{mode}, {count}"] = step
        else:
            measures[f"{mode}, {count}"] = partial(milliseconds, step, 9)
    layers = host_layers(model)
    for rows in HOST_ROWS:
        measures[f"host µs, {rows}"] = partial(host_microseconds, layers, rows)
    # of its own: training leaves hooks in a model
    trained = make_model(kind)
    measures["train"] = partial(milliseconds, training_step(trained, TRAINED_TOKENS), 3)
    return measures, failed


def kernels_of(kind: str, measures: dict[str, Measure]) -> dict[str, object]:
    """Returns the milliseconds that kernels ran in some of the steps, and prints the longest."""
    found: dict[str, object] = {}
    for name in PROFILED:
        if name not in measures:
            continue
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            calls = len(measures[name]()) + WARM_UPS
        totals: Counter[str] = Counter()
        for one in watched.events():
            totals[one.name[:60]] += one.device_time_total / 1e3 / calls
        found[f"kernels of {name}"] = round(totals.total(), 3)
        longest = {kernel: round(total, 3) for kernel, total in totals.most_common(8)}
        print(f"{kind}, {name}: {longest}", flush=True)
    return found


def make_model(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8,
        num_hidden_layers=LAYERS, vocab_size=32000,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16().eval()
    if kind != "bf16":
        for block in model.model.layers:
            for part in (block.self_attn, block.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, torch.nn.Linear):
                        setattr(part, name, packed_layer(linear))
    if kind == "nf4conv":
        nf4conv.patch_linear_4bit(model)
    return model.requires_grad_(False)


def packed_layer(linear: torch.nn.Linear) -> torch.nn.Module:
    layer = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
        quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.weight = bitsandbytes.nn.Params4bit(
        linear.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    return layer.cuda()


def prepared(model: Any, mode: str, count: int) -> Step | str:
    """Returns a step that has run, or what prevents it, which is a result too."""
    try:
        step = prepare(model, mode, count)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"[:300]
    return step


def prepare(model: Any, mode: str, count: int) -> Step:
    """Returns a step: of so many sequences, or with "prefill" of so many tokens."""
    if mode == "prefill":
        ids = torch.randint(0, 32000, (1, count), device="cuda")
        return torch.no_grad()(lambda: model(input_ids=ids, use_cache=False).logits)
    if mode == "eager":
        return one_token(model, model, count)
    if mode == "graph":
        return captured(one_token(model, model, count))
    chosen = None if mode == "default" else mode
    return one_token(model, torch.compile(model, mode=chosen, fullgraph=True), count)


def one_token(model: Any, call: Any, sequences: int) -> Step:
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=512)
    token = torch.full((sequences, 1), 5, dtype=torch.long, device="cuda")
    position = torch.tensor([7], device="cuda")
    arguments = {
        "input_ids": token,
        "past_key_values": cache,
        "cache_position": position,
        "position_ids": position[None].expand(sequences, 1).contiguous(),
        "use_cache": True,
    }
    with torch.no_grad():
        model(**arguments)  # allocates the cache

    def step() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return call(**arguments).logits

    return step


def captured(step: Step) -> Step:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()

    def replay(_: tuple[object, ...] = (step, out)) -> None:  # which the graph reads and writes
        graph.replay()

    return replay


def training_step(model: Any, tokens: int) -> Step:
    """Forward and backward with gradient checkpointing, to the embeddings, as QLoRA needs them."""
    ids = torch.randint(0, 32000, (1, tokens), device="cuda")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    def step() -> None:
        embedded = model.model.embed_tokens(ids).requires_grad_()
        model(inputs_embeds=embedded, labels=ids, use_cache=False).loss.backward()

    return step


def milliseconds(step: Step, count: int) -> list[float]:
    times = []
    for _ in range(count + WARM_UPS):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return times[WARM_UPS:]


def host_layers(model: Any) -> list[Any]:
    return [
        layer
        for block in model.model.layers
        for part in (block.self_attn, block.mlp)
        for layer in part.children()
        if isinstance(layer, torch.nn.Linear)
    ]


def host_microseconds(layers: list[Any], rows: int) -> list[float]:
    xs = {k: torch.randn(1, rows, k, device="cuda").bfloat16() for k in (4096, 14336)}
    calls = [(layer, xs[layer.in_features]) for layer in layers]
    times = []
    with torch.no_grad():
        for _ in range(4 + WARM_UPS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for layer, x in calls:
                layer(x)
            times.append(1e6 * (time.perf_counter() - start) / len(calls))
    torch.cuda.synchronize()
    return times[WARM_UPS:]


if __name__ == "__main__":
    main()
