"""Whole models with 4-bit weights on a GPU: time, memory, and what their kernels take.

    python -m benchmarks.models_gpu llama|qwen3-30b|gpt-oss-20b FOLDER [--kinds KIND ...]
        [--measures MEASURE ...] [--runs 2] [--json FILE]

A model of two layers with random weights is quantized by `nf4conv quantize --moe packed`, its first
layer is repeated as often as the model has layers, and transformers loads the result: "packed".
"patched" is the same after `patch_linear_4bit`, and "bfloat16" the source. FOLDER keeps them; the
mixtures fit into /dev/shm.

Each kind is measured in a process of its own, and these take turns. A measure is "eager N", "graph
N", "default N" or "reduce-overhead N", one token of N sequences as it is, in a captured graph, or
compiled in that mode; "prefill N" of N tokens; "train N", a step of LoRA on attention and experts.
Times are medians of awaited calls; "kernels" is the sum of the times of their kernels, whatever the
host did. A measure that cannot run says why.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile

from benchmarks.running import DEVICE, PYTHON, TOLD, medians, parser, run, save, take_turns
from benchmarks.sources import write_layers
from benchmarks.timing import HAS_GPU, captured, seconds

KINDS: Final = ("bfloat16", "packed", "patched")
TOKENS: Final = ("eager 1", "graph 1", "graph 16", "default 1", "reduce-overhead 1")
MEASURES: Final = {
    "llama": (*TOKENS, "eager 16", "reduce-overhead 16", "prefill 128", "prefill 512"),
    "mixture": (*TOKENS, "prefill 1024", "prefill 4000"),
}
TRAINED: Final = "train 2048"  # the last measure: it leaves hooks in a model
WARM_UPS: Final = 3
TIMED: Final = 9 if HAS_GPU else 1
PROFILED: Final = 2

LLAMA: Final = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000,
}  # fmt: skip
QWEN: Final = {
    "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768,
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS: Final = {
    "num_local_experts": 32, "num_experts_per_tok": 4, "hidden_size": 2880,
    "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088,
}  # fmt: skip
SMALL: Final = {
    "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
SHAPES: Final[dict[str, tuple[str, int, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", 8, LLAMA),
    "qwen3-30b": ("Qwen3MoeConfig", 48, QWEN),
    "gpt-oss-20b": ("GptOssConfig", 24, GPT_OSS),
    "tiny-llama": ("LlamaConfig", 3, LLAMA | SMALL),
    "tiny-qwen3": ("Qwen3MoeConfig", 3, QWEN | SMALL),
}
"""The class of the config, how many layers, and the config of a shape."""


def write_models(shape: str, folder: Path, *, with_source: bool) -> None:
    """Writes the packed model, and the source if that is asked for."""
    import transformers

    name, layers, values = SHAPES[shape]
    two, few = folder / "two layers", folder / "two packed layers"
    if not two.exists():
        common = {"max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": 0}
        config = getattr(transformers, name)(**values, **common, num_hidden_layers=2)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(two)
        run([*PYTHON, "nf4conv", "quantize", two, few, "--moe", "packed", *TOLD])
        repeat_layers(few, folder / "packed", layers)
    if with_source and not (folder / "bfloat16").exists():
        repeat_layers(two, folder / "bfloat16", layers)


def repeat_layers(shallow: Path, deep: Path, layers: int) -> None:
    """Writes a checkpoint with the first layer of another so many times."""
    tensors: dict[str, torch.Tensor] = {}
    for path in shallow.glob("*.safetensors"):
        tensors |= load_file(path)
    first = {name: one for name, one in tensors.items() if ".layers.0." in name}
    rest = {name: one for name, one in tensors.items() if ".layers." not in name}
    config = json.loads((shallow / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = (config["layer_types"][:2] * layers)[:layers]
    write_layers(deep, first, rest, layers, config)


def measure_kind(folder: Path, kind: str, measures: list[str]) -> dict[str, Any]:
    """Loads a model and measures it. Returns milliseconds and gigabytes, or why there are none."""
    from transformers import AutoModelForCausalLM

    import nf4conv
    import nf4conv.inference.moe

    models: list[Any] = []

    def load() -> None:
        models.append(
            AutoModelForCausalLM.from_pretrained(
                folder / ("bfloat16" if kind == "bfloat16" else "packed"),
                device_map={"": DEVICE},
                dtype=torch.bfloat16,
            ).eval()
        )

    found: dict[str, Any] = {"loading, s": seconds(load), "loaded, GB": peak()}
    model = models[0]
    if kind == "patched":
        nf4conv.patch_linear_4bit(model)
    for name in measures:
        try:
            found |= measured(name, step_of(model, name))
        except Exception as error:  # noqa: BLE001 - one measurement must not end the others
            found[f"{name}, failed"] = f"{type(error).__name__}: {error}"[:300]
        torch.compiler.reset()
    return found


def measured(name: str, step: Callable[[], object]) -> dict[str, float]:
    for _ in range(WARM_UPS):
        step()
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    times = [1e3 * seconds(step) for _ in range(TIMED)]
    found = {f"{name}, ms": round(statistics.median(times), 3), f"{name}, GB": peak()}
    if HAS_GPU:
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
        total = sum(event.device_time_total for event in watched.events())
        found[f"{name}, kernels, ms"] = round(total / 1e3 / PROFILED, 3)
    return found


def peak() -> float:
    """Returns the GB of GPU memory that were allocated at most."""
    return round(torch.cuda.max_memory_allocated() / 1e9, 3) if HAS_GPU else 0.0


def step_of(model: Any, name: str) -> Callable[[], object]:
    """Returns what a measure calls."""
    mode, _, number = name.rpartition(" ")
    count = int(number)
    if mode == "prefill":
        ids = tokens(model, 1, count)
        return torch.no_grad()(lambda: model(ids, use_cache=False, logits_to_keep=1).logits)
    if mode == "train":
        return training_step(model, count)
    if mode == "eager":
        return one_token(model, model, count)
    if mode == "graph":
        return captured(one_token(model, model, count))
    compiled = torch.compile(model, mode=None if mode == "default" else mode)
    return one_token(model, compiled, count)


def tokens(model: Any, sequences: int, length: int) -> torch.Tensor:
    return torch.randint(3, model.config.vocab_size, (sequences, length), device=model.device)


def one_token(model: Any, call: Any, sequences: int) -> Callable[[], object]:
    """Returns what computes the next token of some sequences, with a static cache."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=512)
    position = torch.tensor([7], device=model.device)
    given = {
        "input_ids": tokens(model, sequences, 1),
        "past_key_values": cache,
        "cache_position": position,
        "position_ids": position[None].expand(sequences, 1).contiguous(),
        "use_cache": True,
    }
    with torch.no_grad():
        model(**given)  # allocates the cache

    def step() -> object:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            return call(**given).logits

    return step


def training_step(model: Any, length: int) -> Callable[[], object]:
    """Returns a step of LoRA on attention and experts, with gradient checkpointing."""
    from peft import LoraConfig, get_peft_model

    experts = [name for name, _ in model.named_parameters() if name.endswith("_proj")]
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        target_parameters=sorted({name.partition("layers.0.")[2] for name in experts} - {""}),
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    adapted = get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-3)
    ids = tokens(model, 1, length)

    def step() -> None:
        adapted(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    options = parser(__doc__)
    options.add_argument("shape", choices=SHAPES)
    options.add_argument("folder", type=Path, help="for checkpoints")
    options.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    options.add_argument("--measures", nargs="+")
    options.add_argument("--runs", type=int, default=2)
    options.add_argument("--only-kind", help=argparse.SUPPRESS)  # in a process of its own
    chosen = options.parse_args()
    folder = chosen.folder / chosen.shape
    name = "llama" if "llama" in chosen.shape else "mixture"
    measures = chosen.measures or [*MEASURES[name], TRAINED]
    if chosen.only_kind:
        print("\n" + json.dumps(measure_kind(folder, chosen.only_kind, measures)))
        return
    write_models(chosen.shape, folder, with_source="bfloat16" in chosen.kinds)
    words = [*PYTHON, "benchmarks.models_gpu", chosen.shape, chosen.folder, "--measures", *measures]
    contestants = {kind: [*words, "--only-kind", kind] for kind in chosen.kinds}
    results: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _ in range(chosen.runs):
        for kind, found in take_turns(contestants, 1, folder / "out", warm_up=False).items():
            results[kind] += found
            print(kind, json.dumps(found, indent=1), flush=True)
        found_medians = {kind: medians(found) for kind, found in results.items()}
        save(chosen, shape=chosen.shape, medians=found_medians, runs=results)
    for key in sorted(set().union(*found_medians.values())):
        print(key, {kind: found.get(key) for kind, found in found_medians.items()})
    if missing := set(chosen.kinds) - set(results):
        sys.exit(f"failed: {', '.join(missing)}")


if __name__ == "__main__":
    main()
