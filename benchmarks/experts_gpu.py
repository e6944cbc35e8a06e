"""Whole mixtures with packed experts on a GPU: memory, tokens a second, and a step of training.

    python -m benchmarks.experts_gpu qwen3-30b /dev/shm/mixture results.json [--bf16] [--compile]

The source is written with random weights, quantized by `nf4conv quantize --moe packed`, and loaded
by transformers with nothing but `import nf4conv.inference.moe`. With `--alike` the source has two
layers, and the first of the result is repeated.
"""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.repeated_layers import repeat_layers

POOL = 1 << 27  # random elements, from which every tensor of a source is cut
SHARD = 4_000_000_000
RUNS = 15


@dataclass(frozen=True)
class Shape:
    """The shape of a mixture."""

    kind: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    heads: int
    key_value: int
    head: int
    vocabulary: int

    def config(self) -> dict[str, Any]:
        common = {
            "num_hidden_layers": self.layers,
            "num_experts_per_tok": self.top_k,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.kind == "gpt_oss":
            return common | {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "num_local_experts": self.experts,
                "intermediate_size": self.intermediate,
            }
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_local_experts": self.experts,
            "moe_intermediate_size": self.intermediate,
            "intermediate_size": 3 * self.hidden,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
            queries, values = self.heads * self.head, self.key_value * self.head
            sides = {"q": queries, "k": values, "v": values}
            for side, rows in sides.items():
                yield f"{prefix}.self_attn.{side}_proj.weight", (rows, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, queries)
            if self.kind == "gpt_oss":
                yield from self._gpt_oss_layer(prefix, sides)
            else:
                yield from self._qwen_layer(prefix)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)

    def _qwen_layer(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{prefix}.self_attn.q_norm.weight", (self.head,)
        yield f"{prefix}.self_attn.k_norm.weight", (self.head,)
        yield f"{prefix}.mlp.gate.weight", (self.experts, self.hidden)
        for expert in range(self.experts):
            own = f"{prefix}.mlp.experts.{expert}"
            yield f"{own}.gate_proj.weight", (self.intermediate, self.hidden)
            yield f"{own}.up_proj.weight", (self.intermediate, self.hidden)
            yield f"{own}.down_proj.weight", (self.hidden, self.intermediate)

    def _gpt_oss_layer(
        self, prefix: str, sides: dict[str, int]
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        for side, rows in (sides | {"o": self.hidden}).items():
            yield f"{prefix}.self_attn.{side}_proj.bias", (rows,)
        yield f"{prefix}.self_attn.sinks", (self.heads,)
        yield f"{prefix}.mlp.router.weight", (self.experts, self.hidden)
        yield f"{prefix}.mlp.router.bias", (self.experts,)
        both = 2 * self.intermediate
        yield f"{prefix}.mlp.experts.gate_up_proj", (self.experts, self.hidden, both)
        yield f"{prefix}.mlp.experts.gate_up_proj_bias", (self.experts, both)
        yield (
            f"{prefix}.mlp.experts.down_proj",
            (self.experts, self.intermediate, self.hidden),
        )
        yield f"{prefix}.mlp.experts.down_proj_bias", (self.experts, self.hidden)


SHAPES = {
    "qwen3-30b": Shape("qwen3_moe", 48, 128, 8, 2048, 768, 32, 4, 128, 151936),
    "qwen3-4-layers": Shape("qwen3_moe", 4, 128, 8, 2048, 768, 32, 4, 128, 151936),
    "gpt-oss-20b": Shape("gpt_oss", 24, 32, 4, 2880, 2880, 64, 8, 64, 201088),
    "tiny": Shape("qwen3_moe", 2, 8, 2, 128, 64, 2, 2, 64, 128),
    "tiny-gpt-oss": Shape("gpt_oss", 2, 4, 2, 128, 128, 2, 2, 64, 128),
}


def write_source(shape: Shape, folder: Path) -> int:
    """Write a checkpoint of normally distributed bfloat16 weights; returns its bytes."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    elements = POOL if shape.hidden > 1000 else 1 << 16
    pool = torch.empty(elements, dtype=torch.bfloat16, device=device).normal_(0, 0.02).cpu()
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, dimensions in shape.tensors():
        size = 2 * torch.Size(dimensions).numel()
        if filled + size > SHARD and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append((name, dimensions))
        filled += size
    weight_map = {}
    for number, shard in enumerate(shards):
        for name, _ in shard:
            weight_map[name] = f"model-{number:05}.safetensors"
    values = memoryview(pool.view(torch.uint8).numpy())
    with ThreadPoolExecutor(8) as threads:
        paths = [folder / f"model-{number:05}.safetensors" for number in range(len(shards))]
        total = sum(
            threads.map(lambda one: _write_shard(*one, values), zip(paths, shards, strict=True))
        )
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    return total


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]], values: memoryview) -> int:
    """Write a file of tensors that are cut from a pool, norms of ones; returns their bytes."""
    header = {}
    end = 0
    for name, dimensions in shard:
        size = 2 * torch.Size(dimensions).numel()
        header[name] = {"dtype": "BF16", "shape": dimensions, "data_offsets": [end, end + size]}
        end += size
    blob = json.dumps(header).encode()
    blob += b" " * (-len(blob) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        start = len(shard) * 4096
        for name, dimensions in shard:
            left = 2 * torch.Size(dimensions).numel()
            if "norm" in name:
                file.write(b"\x80\x3f" * (left // 2))
                continue
            while left:
                start = (start + 64 * 1001) % len(values)
                piece = values[start : start + min(left, len(values) - start, 1 << 26)]
                file.write(piece)
                left -= len(piece)
                start += len(piece)
    return end


class Record:
    """What was measured; written whenever something is added."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.values: dict[str, Any] = {"shape": name, "versions": versions()}
        self.start = time.perf_counter()

    def add(self, key: str, value: Any) -> None:
        self.values[key] = value
        print(f"[{time.perf_counter() - self.start:6.1f} s] {key}: {value}", flush=True)
        self.path.write_text(json.dumps(self.values, indent=2))

    def attempt(self, key: str, function: Callable[[], Any]) -> None:
        """Add what a function returns, or the error that it ended with."""
        try:
            self.add(key, function())
        except Exception as error:  # noqa: BLE001 - one measurement must not end the others
            self.add(key, f"{type(error).__name__}: {str(error)[:300]}")


def versions() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "transformers", "bitsandbytes", "peft")}
    found["python"] = platform.python_version()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["triton"] = version("triton")
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        found["driver"] = answer.split()[0]
    return found


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


@contextmanager
def decode_all_always() -> Iterator[None]:
    """Let every layer decode all its experts at every forward pass, as others do."""
    from nf4conv.inference.moe import dispatch
    from nf4conv.inference.moe.tensor import OPERATIONS

    def forward(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, x, ids, weights)

    def grouped_mm(x: Any, weight: Any, offs: Any = None, *_: Any, **__: Any) -> Any:
        return torch.nn.functional.grouped_mm(x, weight.decoded(), offs=offs)

    operator = torch.ops.aten._grouped_mm.default
    own = dispatch.packed_experts_forward, OPERATIONS[operator]
    dispatch.packed_experts_forward, OPERATIONS[operator] = forward, grouped_mm
    try:
        yield
    finally:
        dispatch.packed_experts_forward, OPERATIONS[operator] = own


def measure_packed(record: Record, folder: Path, arguments: argparse.Namespace) -> None:
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
    for implementation in arguments.implementations:
        model.set_experts_implementation(implementation)
        record.attempt(f"decode_{implementation}", lambda: decode_eagerly(model, 10))
        record.attempt(f"prefill_{implementation}", lambda: prefill(model))
    if arguments.decode_all:
        with decode_all_always():
            record.attempt("decode_all", lambda: decode_eagerly(model, 4))
            record.attempt("decode_all_graph", lambda: decode_by_graph(model))
        torch.cuda.empty_cache()
    for way in arguments.compile:
        mode, _, part = way.partition("/")
        decode = partial(decode_compiled, model, mode, by_layers=part == "layers")
        record.attempt(f"compiled_{way}", decode)
    if arguments.train_tokens:
        record.attempt("train", lambda: train(model, arguments.train_tokens))


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


def quantize(record: Record, shape: Shape, source: Path, packed: Path) -> None:
    """Write a source, and quantize it by the command."""
    record.add("source_gb", gigabytes(write_source(shape, source)))
    start = time.perf_counter()
    command = [sys.executable, "-m", "nf4conv", "quantize", source, packed, "--moe", "packed"]
    subprocess.run(command, check=True)
    record.add("quantize_s", round(time.perf_counter() - start, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--alike", action="store_true")
    parser.add_argument("--compile", nargs="*", default=[], help="modes; MODE/layers")
    parser.add_argument("--decode-all", action="store_true")
    parser.add_argument("--train-tokens", type=int, default=2048)
    parser.add_argument("--implementations", nargs="*", default=[])
    arguments = parser.parse_args()
    shape = SHAPES[arguments.shape]
    source, packed = arguments.folder / "source", arguments.folder / "packed"
    record = Record(arguments.result, arguments.shape)
    if not packed.exists():
        written = replace(shape, layers=2) if arguments.alike else shape
        quantize(record, written, source, packed)
    if arguments.alike:
        few = packed.rename(arguments.folder / "few")
        repeat_layers(few, packed, shape.layers)
        record.add("layers", "all alike")
    files = packed.glob("*.safetensors")
    record.add("packed_gb", gigabytes(sum(path.stat().st_size for path in files)))
    if not arguments.bf16:
        shutil.rmtree(source)  # memory, where the folder is in /dev/shm
    measure_packed(record, packed, arguments)
    torch.cuda.empty_cache()
    if arguments.bf16:
        shutil.rmtree(packed)
        measure_16_bits(record, source)


if __name__ == "__main__":
    main()
