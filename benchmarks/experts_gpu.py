"""Whole mixtures with packed experts on a GPU: memory, tokens a second, and a step of training.

    python -m benchmarks.experts_gpu qwen3-30b /dev/shm/mixture [--json FILE] [--bf16]
        [--compile MODE[/layers] ...]

A model of two layers with random weights is quantized by `nf4conv quantize --moe packed`, its
first layer is repeated, and transformers loads the result with nothing but `import
nf4conv.inference.moe`.
"""

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.processes import PYTHON, TOLD, run
from benchmarks.records import parser, save
from benchmarks.synthetic import write_layers

RUNS = 15

QWEN = {
    "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS = {
    "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088,
}  # fmt: skip
SMALL = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
}  # fmt: skip
TINY = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHAPES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3-30b": ("Qwen3MoeConfig", 48, QWEN),
    "gpt-oss-20b": ("GptOssConfig", 24, GPT_OSS),
    "tiny": ("Qwen3MoeConfig", 2, QWEN | SMALL | TINY),
    "tiny-gpt-oss": ("GptOssConfig", 2, GPT_OSS | SMALL | {"num_local_experts": 4}),
}
"""The class of the config, how many layers, and the config of a shape."""


def config_of(shape: str, layers: int) -> Any:
    import transformers

    name, _, values = SHAPES[shape]
    common = {"max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": 0}
    return getattr(transformers, name)(**values, **common, num_hidden_layers=layers)


def write_source(shape: str, folder: Path) -> None:
    """Writes a model of two layers with random weights in bfloat16."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(shape, 2), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def repeat_layers(shallow: Path, deep: Path, shape: str) -> None:
    """Writes a checkpoint with the first layer of another as often as the shape has layers."""
    tensors: dict[str, torch.Tensor] = {}
    for path in shallow.glob("*.safetensors"):
        tensors |= load_file(path)
    first = {name: one for name, one in tensors.items() if ".layers.0." in name}
    rest = {name: one for name, one in tensors.items() if ".layers." not in name}
    layers = SHAPES[shape][1]
    config = json.loads((shallow / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:2] * (layers // 2)
    write_layers(deep, first, rest, layers, config)


class Record:
    """What was measured; written whenever something is added."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.values: dict[str, Any] = {"shape": chosen.shape}
        self.start = time.perf_counter()

    def add(self, key: str, value: Any) -> None:
        self.values[key] = value
        print(f"[{time.perf_counter() - self.start:6.1f} s] {key}: {value}", flush=True)
        save(self.chosen, **self.values)

    def attempt(self, key: str, function: Callable[[], Any]) -> None:
        """Add what a function returns, or the error that it ended with."""
        try:
            self.add(key, function())
        except Exception as error:  # noqa: BLE001 - one measurement must not end the others
            self.add(key, f"{type(error).__name__}: {str(error)[:300]}")


def gigabytes(count: int) -> float:
    return round(count / 1e9, 3)


def tokens(model: Any, count: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, model.config.vocab_size, (count, length), generator=generator)
    return ids.to(model.device)


def load(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": 0}, dtype=torch.bfloat16, **options
    ).eval()


@torch.no_grad()
def decode_eagerly(model: Any, steps: int = 20, sequences: int = 1) -> dict[str, float]:
    """Greedy decoding, a forward pass for each token."""
    ids = tokens(model, sequences, 32)
    out = model(ids, use_cache=True)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        ids = out.logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model(ids, past_key_values=out.past_key_values, use_cache=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    return {
        "ms": round(1e3 * seconds, 2),
        "tokens_per_s": round(sequences / seconds, 1),
        "peak_gb": gigabytes(torch.cuda.max_memory_allocated()),
    }


def static_step(model: Any, sequences: int) -> tuple[Callable[[], Any], torch.Tensor]:
    """Return what decodes one token with a static cache, and the place in the cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=128)
    ids = tokens(model, sequences, 32)
    place = torch.arange(32, device=model.device)
    model(ids, past_key_values=cache, cache_position=place)
    last = ids[:, -1:].clone()
    at = torch.tensor([32], device=model.device)
    positions = at[None].expand(sequences, 1).contiguous()

    def step(call: Any = model) -> Any:
        return call(
            last, past_key_values=cache, cache_position=at, position_ids=positions, use_cache=True
        ).logits

    return step, at


@torch.no_grad()
def decode_by_graph(model: Any, sequences: int = 1) -> dict[str, float]:
    """One decoding step, captured as a CUDA graph."""
    torch.cuda.reset_peak_memory_stats()
    step, _ = static_step(model, sequences)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    milliseconds = timed(graph.replay)
    return {
        "ms": round(milliseconds, 3),
        "tokens_per_s": round(1e3 * sequences / milliseconds, 1),
        "peak_gb": gigabytes(torch.cuda.max_memory_allocated()),
    }


@torch.no_grad()
def decode_compiled(model: Any, mode: str, *, by_layers: bool = False) -> dict[str, float]:
    """One decoding step under torch.compile: the whole model, or its layers one by one."""
    step, _ = static_step(model, 1)
    for _ in range(4):  # each writes to the next place of the cache
        expected = step()
    step, _ = static_step(model, 1)
    torch._dynamo.utils.counters.clear()
    compiled = model
    if by_layers:  # transformers' cache knows layers by number: each has a graph of its own
        torch._dynamo.config.recompile_limit = 1000
        for layer in model.model.layers:
            layer.compile(mode=mode)
    else:
        compiled = torch.compile(model, mode=mode)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        found = step(compiled)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    cosine = torch.cosine_similarity(found.float().flatten(), expected.float().flatten(), dim=0)
    milliseconds = timed(lambda: step(compiled))
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    torch.compiler.reset()
    return {
        "ms": round(milliseconds, 3),
        "tokens_per_s": round(1e3 / milliseconds, 1),
        "first_calls_s": [round(seconds, 2) for seconds in times],
        "graphs": graphs,
        "cosine_to_eager": round(cosine.item(), 5),
        "peak_gb": gigabytes(torch.cuda.max_memory_allocated()),
    }


@torch.no_grad()
def prefill(model: Any, length: int = 1024) -> dict[str, float]:
    ids = tokens(model, 1, length)
    model(ids, logits_to_keep=1)
    torch.cuda.reset_peak_memory_stats()
    milliseconds = timed(lambda: model(ids, logits_to_keep=1), 5)
    return {
        "ms": round(milliseconds, 2),
        "tokens_per_s": round(1e3 * length / milliseconds),
        "peak_gb": gigabytes(torch.cuda.max_memory_allocated()),
    }


def timed(function: Callable[[], Any], runs: int = RUNS) -> float:
    """Return the median milliseconds of a function."""
    times = []
    for turn in range(runs + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        if turn >= 2:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def train(model: Any, length: int, steps: int = 4) -> dict[str, Any]:
    """QLoRA on experts and attention, with checkpointing."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    adapted = get_peft_model(model, config).train()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    ids = tokens(model, 1, length)
    torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = adapted(ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(round(loss.item(), 4))
    return {
        "ms": round(1e3 * statistics.median(times[1:]), 1),
        "losses": losses,
        "peak_gb": gigabytes(torch.cuda.max_memory_allocated()),
        "trained_parameters": sum(p.numel() for p in trained),
    }


def measure_packed(record: Record, folder: Path) -> None:
    """Measure everything about the packed model; training last, for it changes the model."""
    import nf4conv
    import nf4conv.inference.moe

    start = time.perf_counter()
    model = load(folder)
    torch.cuda.synchronize()
    record.add("load_s", round(time.perf_counter() - start, 1))
    record.add("loaded_gb", gigabytes(torch.cuda.memory_allocated()))
    record.attempt("prefill_1024", lambda: prefill(model))
    record.attempt("prefill_4000", lambda: prefill(model, 4000))
    record.attempt("decode_eager", lambda: decode_eagerly(model))
    record.attempt("decode_graph", lambda: decode_by_graph(model))
    record.attempt("decode_graph_16", lambda: decode_by_graph(model, 16))
    nf4conv.patch_linear_4bit(model)
    record.attempt("decode_eager_patched", lambda: decode_eagerly(model))
    record.attempt("decode_graph_patched", lambda: decode_by_graph(model))
    for way in record.chosen.compile:
        mode, _, part = way.partition("/")
        decode = partial(decode_compiled, model, mode, by_layers=part == "layers")
        record.attempt(f"compiled_{way}", decode)
    if record.chosen.train_tokens:
        record.attempt("train", lambda: train(model, record.chosen.train_tokens))


def measure_16_bits(record: Record, folder: Path) -> None:
    """Measure the source itself."""
    start = time.perf_counter()
    model = load(folder)
    record.add("bf16_load_s", round(time.perf_counter() - start, 1))
    record.add("bf16_loaded_gb", gigabytes(torch.cuda.memory_allocated()))
    record.attempt("bf16_decode_eager", lambda: decode_eagerly(model))
    record.attempt("bf16_prefill_1024", lambda: prefill(model))
    record.attempt("bf16_decode_graph", lambda: decode_by_graph(model))
    record.attempt("bf16_decode_graph_16", lambda: decode_by_graph(model, 16))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("shape", choices=SHAPES)
    options.add_argument("folder", type=Path, help="for checkpoints")
    options.add_argument("--bf16", action="store_true", help="measure the source, too")
    options.add_argument("--compile", nargs="*", default=[], help="modes; MODE/layers")
    options.add_argument("--train-tokens", type=int, default=2048)
    options.add_argument("--write-only", action="store_true", help="only write the checkpoint")
    chosen = options.parse_args()
    source, few, packed = (chosen.folder / name for name in ("source", "few", "packed"))
    record = Record(chosen)
    if not packed.exists():
        write_source(chosen.shape, source)
        run([*PYTHON, "nf4conv", "quantize", source, few, "--moe", "packed", *TOLD])
        repeat_layers(few, packed, chosen.shape)
    files = packed.glob("*.safetensors")
    record.add("packed_gb", gigabytes(sum(path.stat().st_size for path in files)))
    if chosen.write_only:
        return
    measure_packed(record, packed)
    torch.cuda.empty_cache()
    if chosen.bf16:
        shutil.rmtree(packed)  # memory, where the folder is in /dev/shm
        repeat_layers(source, chosen.folder / "deep", chosen.shape)
        measure_16_bits(record, chosen.folder / "deep")


if __name__ == "__main__":
    main()
