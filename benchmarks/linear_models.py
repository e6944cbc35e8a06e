"""Models with 4-bit layers on a GPU, as they run: eagerly, compiled, in CUDA graphs, in training.

    python -m benchmarks.linear_models [--json FILE] [--commit HASH]

A Llama of eight layers of the 8B shape with random weights, in bfloat16, with bitsandbytes' layers
and with the same layers after `patch_linear_4bit`. Each is prepared in a process of its own, all at
once; then they are measured one after the other. Times are medians of calls that are awaited.
"host" is what a call costs the caller over 56 different layers in turn, on a queue that is never
full.
"""

import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from threading import BrokenBarrierError
from typing import Any

import bitsandbytes
import torch

import nf4conv
from benchmarks.records import parser, save, versions

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

Step = Callable[[], object]


def main() -> None:
    arguments = parser(__doc__).parse_args()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(KINDS))
    turn = context.Lock()
    results = context.Queue()
    processes = [context.Process(target=run, args=(kind, barrier, turn, results)) for kind in KINDS]
    for process in processes:
        process.start()
    found: dict[str, dict[str, object]] = {}
    while len(found) < len(KINDS):
        kind, result = results.get()
        found[kind] = result
        print(kind, result, flush=True)
        record = {"versions": versions(arguments.commit), "layers": LAYERS, "results": found}
        save(record, arguments.json)
    for process in processes:
        process.join()
    for name in sorted(set().union(*found.values())):
        print(name, {kind: found[kind].get(name) for kind in KINDS}, flush=True)


def run(kind: str, barrier: Any, turn: Any, results: Any) -> None:
    """Prepares a kind of model and its layers, waits for the others, and measures."""
    warnings.simplefilter("ignore")
    steps: dict[str, Step] = {}
    found: dict[str, object] = {}
    layers: list[Any] = []
    try:
        model = make_model(kind)
        for mode, count in MODES:
            step = prepared(model, mode, count)
            if isinstance(step, str):
                found[f"{mode}, {count}"] = step
            else:
                steps[f"{mode}, {count}"] = step
        layers = host_layers(model)
    except Exception as error:  # noqa: BLE001 - the others are waiting
        found["failed"] = f"{type(error).__name__}: {error}"[:300]
    with suppress(BrokenBarrierError):  # then others compile beside what is measured
        barrier.wait(120)
    with turn:
        try:
            for name, step in steps.items():
                found[name] = milliseconds(step, 25)
            for rows in HOST_ROWS if layers else ():
                found[f"host µs, {rows}"] = host_microseconds(layers, rows)
            if layers:  # last: it leaves hooks in the model
                found["train"] = milliseconds(training_step(model, TRAINED_TOKENS), 5)
        except Exception as error:  # noqa: BLE001 - the others are waiting
            found["failed"] = f"{type(error).__name__}: {error}"[:300]
    results.put((kind, found))


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


def milliseconds(step: Step, rounds: int) -> float:
    times = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times[3:]), 3)


def host_layers(model: Any) -> list[Any]:
    return [
        layer
        for block in model.model.layers
        for part in (block.self_attn, block.mlp)
        for layer in part.children()
        if isinstance(layer, torch.nn.Linear)
    ]


def host_microseconds(layers: list[Any], rows: int) -> float:
    xs = {k: torch.randn(1, rows, k, device="cuda").bfloat16() for k in (4096, 14336)}
    calls = [(layer, xs[layer.in_features]) for layer in layers]
    times = []
    with torch.no_grad():
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for layer, x in calls:
                layer(x)
            times.append((time.perf_counter() - start) / len(calls))
    torch.cuda.synchronize()
    return round(1e6 * statistics.median(times[3:]), 1)


if __name__ == "__main__":
    main()
