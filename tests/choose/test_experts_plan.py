"""Mixtures of experts: what is packed by default, what stays, and what is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import contents, save_model, tensors_of
from hub_server import Hub, Repo

import nf4conv
from nf4conv.errors import PlanError
from nf4conv.models.families import experts_in

EXPERTS = "model.layers.{}.mlp.experts"
NUMBER = 4
PACKED = {"moe": "packed"}
CPU = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}
REPO = "some-org/mixture"
INSTALL = 'pip install nf4conv "transformers>=5.8" accelerate bitsandbytes'
Tensors = dict[str, torch.Tensor]


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def common(layer: int) -> Tensors:
    return {
        f"model.layers.{layer}.self_attn.q_proj.weight": random(64, 64),
        f"model.layers.{layer}.mlp.shared_expert_gate.weight": random(1, 64),
        f"model.layers.{layer}.input_layernorm.weight": random(64),
    }


def one_by_one() -> Tensors:
    """Returns two layers of a qwen2_moe."""
    tensors = {}
    for layer in range(2):
        tensors |= common(layer) | {f"model.layers.{layer}.mlp.gate.weight": random(NUMBER, 64)}
        for expert in range(NUMBER):
            path = f"{EXPERTS.format(layer)}.{expert}"
            tensors[f"{path}.gate_proj.weight"] = random(128, 64)
            tensors[f"{path}.up_proj.weight"] = random(128, 64)
            tensors[f"{path}.down_proj.weight"] = random(64, 128)
    return tensors


def stacked() -> Tensors:
    """Returns two layers of a gpt_oss."""
    tensors = {}
    for layer in range(2):
        path = EXPERTS.format(layer)
        tensors |= common(layer) | {f"model.layers.{layer}.mlp.router.weight": random(NUMBER, 64)}
        tensors[f"{path}.gate_up_proj"] = random(NUMBER, 64, 256)
        tensors[f"{path}.gate_up_proj_bias"] = random(NUMBER, 256)
        tensors[f"{path}.down_proj"] = random(NUMBER, 128, 64)
    return tensors


ARCHITECTURES = {
    "qwen2_moe": ("Qwen2MoeForCausalLM", one_by_one),
    "gpt_oss": ("GptOssForCausalLM", stacked),
}
WITHOUT_STACKS = ("LongcatFlashForCausalLM", one_by_one)


def write(
    folder: Path, model_type: str, change: Callable[[Tensors], object] = lambda _: None
) -> Path:
    architecture, make = ARCHITECTURES.get(model_type, WITHOUT_STACKS)
    tensors = make()
    change(tensors)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "num_experts": NUMBER,
        "vocab_size": 1000,
    }
    return save_model(folder, tensors, config)


def packed_experts(found: Tensors, layer: int) -> list[str]:
    path = EXPERTS.format(layer)
    return [name for name in found if name.startswith(path) and name.endswith(".absmax")]


# --- the default ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_mixture_is_packed_and_says_who_reads_it(model_type, tmp_path):
    source = write(tmp_path / "source", model_type)
    plan = nf4conv.plan_quantize(source).made
    [note] = [note for note in plan.notes if "experts are packed" in note]
    assert "transformers 5 with nf4conv installed" in note
    assert "--moe portable" in note
    # only a family that has them one by one on disk is known so to other loaders
    assert ("4.57" in note) is (model_type == "qwen2_moe")
    report = nf4conv.quantize(source, tmp_path / "out", **CPU)
    imports = "import nf4conv.inference.moe\nfrom transformers import AutoModelForCausalLM\n"
    assert report.install == INSTALL
    assert report.loading.startswith(f"{imports}model = AutoModelForCausalLM.from_pretrained(")
    use = (tmp_path / "out/README.md").read_text().partition("## Use")[2]
    assert use.startswith(f"\n\n```bash\n{INSTALL}\n```\n\n```python\n{imports}\n")
    # transformers 4 loads what it finds one by one
    assert ("With transformers 4 (" in use) is (model_type == "qwen2_moe")
    found = tensors_of(tmp_path / "out")
    assert len(packed_experts(found, 0)) == len(packed_experts(found, 1)) == 3 * NUMBER


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_what_is_not_packed_is_listed_for_every_loader(model_type, tmp_path):
    source = write(tmp_path / "source", model_type)
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    # checks the list by the rules of transformers 4, transformers 5 and vLLM, in both directions
    assert nf4conv.verify(tmp_path / "out", source=source, **CPU).passed
    config = json.loads((tmp_path / "out/config.json").read_text())
    listed = config["quantization_config"]["llm_int8_skip_modules"]
    router = "gate" if model_type == "qwen2_moe" else "router"
    for layer in range(2):
        assert f"model.layers.{layer}.mlp.{router}" in listed
        assert f"model.layers.{layer}.mlp.shared_expert_gate" in listed
    assert not any("experts." in entry for entry in listed)


def test_what_is_for_the_hub_stays_portable_unless_the_user_says_otherwise(tmp_path):
    source = write(tmp_path / "source", "qwen2_moe")
    push = {"push_to_hub": REPO}
    plan = nf4conv.plan_quantize(source, **push).made
    assert plan.totals.packed == 2
    assert any("--moe packed" in note for note in plan.notes)
    assert nf4conv.plan_quantize(source, **PACKED, **push).made.totals.packed == 2 + 6 * NUMBER


def test_a_source_in_4_bits_keeps_its_layout(tmp_path):
    source = write(tmp_path / "source", "qwen2_moe")
    for moe in ("packed", "portable"):
        first = nf4conv.quantize(source, tmp_path / moe, moe=moe, **CPU)
        again = nf4conv.quantize(tmp_path / moe, tmp_path / f"{moe}-again", **CPU)
        assert again.totals.stay == again.totals.packed == first.totals.packed
    push = {"push_to_hub": REPO}
    assert nf4conv.plan_quantize(tmp_path / "packed", **push).made.totals.stay == 2 + 6 * NUMBER


def test_every_weight_of_a_checkpoint_has_one_format(tmp_path):
    """vLLM joins the states of q, k and v, of gate and up, and of all experts of a layer."""
    source = write(tmp_path / "source", "gpt_oss")
    nf4conv.quantize(source, tmp_path / "out", blocksize=128, **CPU)
    found = tensors_of(tmp_path / "out")
    states = []
    for name, tensor in found.items():
        if "quant_state" in name:
            state = json.loads(bytes(tensor.tolist()))
            states.append((state["quant_type"], state["blocksize"], state["dtype"]))
    assert len(states) == 2 + 6 * NUMBER
    assert set(states) == {("nf4", 128, "bfloat16")}


# --- one that has to stay -------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["*layers.0*experts.1.down_proj*", "*layers.0*experts.1.*"])
def test_an_expert_that_is_excluded_keeps_all_experts_of_its_layer(pattern, tmp_path):
    source = write(tmp_path / "source", "qwen2_moe")
    plan = nf4conv.plan_quantize(source, moe="packed", exclude=(pattern,)).made
    rows = [row for row in plan.rows() if ".experts." in row.name]
    assert {row.action for row in rows if ".layers.0." in row.name} == {"copy"}
    assert {row.action for row in rows if ".layers.1." in row.name} == {"pack"}
    reasons = {row.reason for row in rows if ".layers.0." in row.name}
    assert reasons == {
        "excluded by the user",
        "loaders need the experts of a layer alike, and one is kept: excluded by the user",
    }


# --- bad input ------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Tensors], object]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def with_shape(name: str, *shape: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: random(*shape)})


FIRST = EXPERTS.format(0)
LAST = [f"{FIRST}.{NUMBER - 1}.{name}_proj.weight" for name in ("gate", "up", "down")]
BAD = {
    "a projection is missing": (
        "qwen2_moe",
        without(f"{FIRST}.1.up_proj.weight"),
        r"experts\.1\.up_proj\.weight is missing: of 4 experts of this layer 3 have it",
    ),
    "the last expert is missing": (
        "qwen2_moe",
        without(*LAST),
        r"experts\.3\.down_proj\.weight is missing: of 4 experts of this layer 3 have it",
    ),
    "an expert too many": (
        "qwen2_moe",
        with_shape(f"{FIRST}.4.up_proj.weight", 128, 64),
        "experts: 5 experts, but config.json says 4",
    ),
    "another shape": (
        "qwen2_moe",
        with_shape(f"{FIRST}.2.up_proj.weight", 128, 96),
        r"experts\.2\.up_proj\.weight is \[128, 96\], but .*experts\.0\.up_proj\.weight of the "
        r"same layer is \[128, 64\]",
    ),
    "gate and up do not divide": (
        "gpt_oss",
        with_shape(f"{FIRST}.gate_up_proj", NUMBER, 64, 257),
        "gate_up_proj: 257 outputs of an expert do not divide into those of gate_proj and up_proj",
    ),
    "another number of experts": (
        "gpt_oss",
        lambda tensors: tensors.update(
            {
                f"{FIRST}.gate_up_proj": random(3, 64, 256),
                f"{FIRST}.down_proj": random(3, 128, 64),
            }
        ),
        "down_proj: a stack of 3 experts, but config.json says 4",
    ),
    "stacks that do not fit": (
        "gpt_oss",
        with_shape(f"{FIRST}.down_proj", NUMBER, 96, 64),
        r"down_proj: a stack of experts \[4, 96, 64\] does not fit .*gate_up_proj \[4, 64, 256\]",
    ),
    "[out, in] where the family has [in, out]": (
        "gpt_oss",
        lambda tensors: tensors.update(
            {
                f"{FIRST}.gate_up_proj": random(NUMBER, 256, 64),
                f"{FIRST}.down_proj": random(NUMBER, 64, 128),
            }
        ),
        "does not fit",
    ),
    "half of a layer": (
        "gpt_oss",
        without(f"{FIRST}.down_proj"),
        r"the checkpoint lacks model\.layers\.0\.mlp\.experts\.down_proj",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_damaged_layers_are_refused_before_anything_is_written(case, tmp_path):
    model_type, change, message = BAD[case]
    source = write(tmp_path / "source", model_type, change)
    with pytest.raises(PlanError, match=message):
        nf4conv.quantize(source, tmp_path / "out", **PACKED, **CPU)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_parts_and_a_streamed_source_give_the_bytes_of_a_single_run(model_type, tmp_path, hub: Hub):
    options = {**PACKED, "max_shard_size": 20_000}
    source = write(tmp_path / "source", model_type)
    nf4conv.quantize(source, tmp_path / "single", **options, **CPU)
    single = contents(tmp_path / "single")
    for name in ("3/3", "1/3", "2/3"):
        nf4conv.quantize(source, tmp_path / "parts", **options, **CPU, part=name)
    assert contents(tmp_path / "parts") == single

    hub.repos[REPO] = Repo()
    hub.repos[REPO].commit(contents(source))
    where = {"cache_dir": tmp_path / "cache", "stream": True}
    nf4conv.quantize(REPO, tmp_path / "streamed", **options, **CPU, **where)
    files = contents(tmp_path / "streamed")
    for name in files.keys() - {"README.md", "nf4conv.json"}:
        assert files[name] == single[name], name


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"num_experts": 8, "architectures": ["Qwen2MoeForCausalLM"]}, {8}),
        ({"num_experts": [8, 16]}, set()),  # layer by layer
    ],
)
def test_how_many_experts_a_config_names(config, numbers):
    assert experts_in(config) == numbers
