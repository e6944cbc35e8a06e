"""Planning a checkpoint of 100,000 tensors in 1,000 files takes a few seconds, not minutes; a part
of it, too.
"""

from pathlib import Path

import pytest
from kimi import write_checkpoint
from pace import units_of

import nf4conv
from nf4conv.options import RunOptions
from nf4conv.plan.parts import plan_part

LAYERS, EXPERTS = 80, 416
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
}


def write_headers(folder: Path) -> int:
    """Writes a mixture of experts without data; returns how many tensors it has."""
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": [1024, 512], "lm_head.weight": [1024, 512]}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = [512, 512]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{name}.weight"] = [512]
        shapes[f"{prefix}.mlp.gate.weight"] = [EXPERTS, 512]
        for expert in range(EXPERTS):
            experts = f"{prefix}.mlp.experts.{expert}"
            for name in ("gate", "up"):
                shapes[f"{experts}.{name}_proj.weight"] = [128, 512]
            shapes[f"{experts}.down_proj.weight"] = [512, 128]
    tensors = [(name, "BF16", shape) for name, shape in shapes.items()]
    return write_checkpoint(folder, tensors, 1000, CONFIG)


@pytest.mark.parametrize("moe", ["portable", "packed"])
def test_a_hundred_thousand_tensors(tmp_path: Path, moe: str):
    tensors = write_headers(tmp_path / "source")
    assert tensors > 100_000
    options = {"moe": moe, "max_shard_size": 10**7}
    plans = []

    def plan_one_part() -> None:
        plan = nf4conv.plan_quantize(tmp_path / "source", **options).made
        part = plan_part(plan, RunOptions(part="33/64"))
        assert part.record["source"]["id"] == "source"
        plans[:] = [(plan, part)]

    units = units_of(plan_one_part, 60)
    print(f"{tensors:,} tensors, --moe {moe}: {units:.1f}")
    [(plan, part)] = plans
    packed = sum(row.action == "pack" for row in plan.rows())
    assert packed == 4 * LAYERS + (3 * LAYERS * EXPERTS if moe == "packed" else 0)
    assert 0 < len(part.output.shards) < len(plan.output.shards) / 40
    assert units < 60  # 21 to 26 were measured; a quadratic step takes a hundred seconds
