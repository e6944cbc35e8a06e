"""Sizes of mixtures of experts: packed, portable and in 16 bits, at the shapes of real models.

    python -m benchmarks.experts_sizes

Plans need headers only. The weights are holes in files of the full size, so nothing of any size is
written or downloaded. The shapes are those of the models' config.json, their language models only.
"""

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nf4conv import QuantizeOptions, plan_quantization

RESULT = Path(__file__).parent / "results" / "experts_sizes.json"
Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Mixture:
    """The shapes of a model; names of fields are those of config.json where there are such."""

    model_type: str
    architecture: str
    hidden_size: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    intermediate_size: int  # of an expert
    experts: int
    vocab_size: int
    dense_layers: int = 0  # the first ones, which have no experts
    dense_size: int = 0
    shared_size: int = 0  # of the shared experts together
    is_tied: bool = False
    # low-rank attention of DeepSeek: ranks of q and kv, width of the rotary part
    latent: tuple[int, int, int] | None = None
    # tensors of a layer's experts: path of the layer's mixture, and names
    mixture: str = "mlp"
    experts_in: str = "single"


MODELS = {
    "Qwen3-30B-A3B": Mixture(
        "qwen3_moe", "Qwen3MoeForCausalLM", 2048, 48, 32, 4, 128, 768, 128, 151936
    ),
    "gpt-oss-20b": Mixture(
        "gpt_oss", "GptOssForCausalLM", 2880, 24, 64, 8, 64, 2880, 32, 201088,
        experts_in="gpt_oss",
    ),
    "Mixtral-8x7B": Mixture(
        "mixtral", "MixtralForCausalLM", 4096, 32, 32, 8, 128, 14336, 8, 32000,
        mixture="block_sparse_moe", experts_in="mixtral",
    ),
    "DeepSeek-V3": Mixture(
        "deepseek_v3", "DeepseekV3ForCausalLM", 7168, 61, 128, 128, 128, 2048, 256, 129280,
        dense_layers=3, dense_size=18432, shared_size=2048, latent=(1536, 512, 64),
    ),
    "GLM-4.5-Air": Mixture(
        "glm4_moe", "Glm4MoeForCausalLM", 4096, 46, 96, 8, 128, 1408, 128, 151552,
        dense_layers=1, dense_size=10944, shared_size=1408,
    ),
    "Qwen3-235B-A22B": Mixture(
        "qwen3_moe", "Qwen3MoeForCausalLM", 4096, 94, 64, 4, 128, 1536, 128, 151936
    ),
    "granite-3.1-3b-a800m": Mixture(
        "granitemoe", "GraniteMoeForCausalLM", 1536, 32, 24, 8, 64, 512, 40, 49155,
        is_tied=True, mixture="block_sparse_moe", experts_in="granite",
    ),
    "Llama-4-Scout": Mixture(
        "llama4_text", "Llama4ForCausalLM", 5120, 48, 40, 8, 128, 8192, 16, 202048,
        shared_size=8192, mixture="feed_forward", experts_in="llama4",
    ),
}  # fmt: skip


def shapes_of(model: Mixture) -> Shapes:
    """Yields name and shape of every tensor of a model."""
    width = model.hidden_size
    yield "model.embed_tokens.weight", (model.vocab_size, width)
    for number in range(model.layers):
        layer = f"model.layers.{number}"
        yield from _attention(f"{layer}.self_attn", model)
        yield f"{layer}.input_layernorm.weight", (width,)
        yield f"{layer}.post_attention_layernorm.weight", (width,)
        if number < model.dense_layers:
            yield from _mlp(f"{layer}.mlp", width, model.dense_size)
        else:
            yield from _mixture(f"{layer}.{model.mixture}", model)
    yield "model.norm.weight", (width,)
    if not model.is_tied:
        yield "lm_head.weight", (model.vocab_size, width)


def _attention(path: str, model: Mixture) -> Shapes:
    width = model.hidden_size
    if model.latent is None:
        queries = model.heads * model.head_dim
        keys = model.key_value_heads * model.head_dim
        yield f"{path}.q_proj.weight", (queries, width)
        yield f"{path}.k_proj.weight", (keys, width)
        yield f"{path}.v_proj.weight", (keys, width)
        yield f"{path}.o_proj.weight", (width, queries)
        return
    query_rank, rank, rotary = model.latent
    yield f"{path}.q_a_proj.weight", (query_rank, width)
    yield f"{path}.q_b_proj.weight", (model.heads * (model.head_dim + rotary), query_rank)
    yield f"{path}.kv_a_proj_with_mqa.weight", (rank + rotary, width)
    yield f"{path}.kv_b_proj.weight", (model.heads * 2 * model.head_dim, rank)
    yield f"{path}.o_proj.weight", (width, model.heads * model.head_dim)


def _mlp(path: str, width: int, inner: int) -> Shapes:
    yield f"{path}.gate_proj.weight", (inner, width)
    yield f"{path}.up_proj.weight", (inner, width)
    yield f"{path}.down_proj.weight", (width, inner)


def _mixture(path: str, model: Mixture) -> Shapes:
    count = model.experts
    width = model.hidden_size
    inner = model.intermediate_size
    routers = {"gpt_oss": "router", "granite": "router.layer", "llama4": "router"}
    yield f"{path}.{routers.get(model.experts_in, 'gate')}.weight", (count, width)
    if model.shared_size:
        name = "shared_expert" if model.experts_in == "llama4" else "shared_experts"
        yield from _mlp(f"{path}.{name}", width, model.shared_size)
    if model.experts_in == "granite":
        yield f"{path}.input_linear.weight", (count, 2 * inner, width)
        yield f"{path}.output_linear.weight", (count, width, inner)
    elif model.experts_in in ("gpt_oss", "llama4"):
        yield f"{path}.experts.gate_up_proj", (count, width, 2 * inner)
        yield f"{path}.experts.down_proj", (count, inner, width)
        if model.experts_in == "gpt_oss":
            yield f"{path}.experts.gate_up_proj_bias", (count, 2 * inner)
            yield f"{path}.experts.down_proj_bias", (count, width)
    else:
        for expert in range(count):
            single = f"{path}.experts.{expert}"
            if model.experts_in == "mixtral":
                yield f"{single}.w1.weight", (inner, width)
                yield f"{single}.w2.weight", (width, inner)
                yield f"{single}.w3.weight", (inner, width)
            else:
                yield from _mlp(single, width, inner)


def write(folder: Path, model: Mixture) -> int:
    """Writes a checkpoint whose weights are holes, and returns the number of its parameters."""
    table = {}
    position = 0
    for name, shape in shapes_of(model):
        size = 2 * math.prod(shape)
        table[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    header = json.dumps(table).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)
    config = {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "dtype": "bfloat16",
        "num_hidden_layers": model.layers,
        "num_experts": model.experts,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "tie_word_embeddings": model.is_tied,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return position // 2


def sizes_of(model: Mixture) -> dict[str, float]:
    """Returns the sizes of a model in GB, by how its experts are stored."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        parameters = write(source, model)
        sizes = {"parameters": parameters / 1e9, "16 bits": 2 * parameters / 1e9}
        for moe in ("portable", "packed"):
            totals = plan_quantization(source, QuantizeOptions(moe=moe)).totals()
            sizes[moe] = totals.bytes_after / 1e9
    return sizes


def main() -> None:
    """Prints the table and writes it as JSON."""
    found = {name: sizes_of(model) for name, model in MODELS.items()}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    print("| | parameters | 16 bits | portable | packed | packed is smaller |")
    print("|---|---|---|---|---|---|")
    for name, sizes in found.items():
        cells = [f"{sizes['parameters']:.1f} B"]
        cells += [f"{sizes[key]:.1f} GB" for key in ("16 bits", "portable", "packed")]
        cells.append(f"{sizes['16 bits'] / sizes['packed']:.2f} ×")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
