"""Packed mixtures of experts are read in every layout, against bitsandbytes and transformers.

`dequantize` gives them back the names and the layout that plain transformers loads.
"""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import assert_same_tensors, contents, tensors_of
from comparing import compared
from hub_server import Repo
from packed_experts import (
    CLASSES,
    EXPERTS,
    encode,
    make_mixture,
    pack_as_unsloth_does_gpt_oss,
    pack_one_by_one,
    pack_stacked,
    save,
)
from safetensors.torch import save_file

import nf4conv
from nf4conv.errors import PlanError, SourceError
from nf4conv.report.as_json import to_json
from nf4conv.report.text.lines import inspection_lines

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

CPU = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}
WORDS = torch.arange(24).view(2, 12) % 90 + 3


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: make_mixture(family, folder / family) for family in CLASSES}


def logits(folder: Path) -> torch.Tensor:
    """Returns what plain transformers computes; fails if a weight is missing or left over."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(input_ids=WORDS, use_cache=False).logits.float()


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])


@pytest.mark.parametrize("nested", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("family", CLASSES)
def test_single_experts_go_back_to_the_layout_of_their_family(mixtures, tmp_path, family, nested):
    source = mixtures[family]
    expected = pack_one_by_one(family, source, tmp_path / "nf4", compress_statistics=nested)
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", expected)
    assert correlation(logits(tmp_path / "out"), logits(source)) > 0.8


@pytest.mark.parametrize("family", ["gpt_oss", "mistral4", "granitemoe"])
def test_stacks_in_4_bits_decode_as_they_are(mixtures, tmp_path, family):
    expected = pack_stacked(mixtures[family], tmp_path / "nf4")
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", expected)
    assert correlation(logits(tmp_path / "out"), logits(mixtures[family])) > 0.8


def test_the_names_of_unsloth_become_those_of_gpt_oss(mixtures, tmp_path):
    expected = pack_as_unsloth_does_gpt_oss(mixtures["gpt_oss"], tmp_path / "nf4")
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", expected)
    assert correlation(logits(tmp_path / "out"), logits(mixtures["gpt_oss"])) > 0.8


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_experts_decode_straight_to_another_dtype(mixtures, tmp_path, dtype):
    """Not by way of bfloat16: a 4-bit value has more digits."""
    expected = pack_one_by_one("gpt_oss", mixtures["gpt_oss"], tmp_path / "nf4")
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "out", dtype=dtype, **CPU)
    found = tensors_of(tmp_path / "out")
    for name, tensor in expected.items():
        assert found[name].dtype == getattr(torch, dtype)
        # the oracle's values are bfloat16
        torch.testing.assert_close(
            found[name].float(), tensor.float(), rtol=2**-8, atol=1e-6, msg=name
        )
    experts = "model.layers.0.mlp.experts.down_proj"
    assert not torch.equal(found[experts].float(), expected[experts].float())


# --- what does not fit ---------------------------------------------------------------------------

EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Changes the tensors of a checkpoint, which is then a single file."""
    tensors = tensors_of(folder)
    for file in folder.glob("model*"):
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key == name or key.startswith(f"{name}.")]:
            del tensors[key]

    return change


def without_last_expert(tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if ".layers.1.mlp.experts.3." in key]:
        del tensors[key]


def of_another_shape(tensors: dict[str, torch.Tensor]) -> None:
    """A whole expert, whose matrices go with each other."""
    for projection in ("up", "gate", "down"):
        name = EXPERT.replace("up_proj", f"{projection}_proj")
        without(name)(tensors)
        shape = (64, 32) if projection == "down" else (32, 64)
        encode(tensors, name, torch.randn(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(EXPERT), r"layers\.0\.mlp\.experts\.gate_up_proj: expert 2 has no up_proj"),
        (without_last_expert, r"layers\.1\.mlp\.experts\.\w+: expert 3 has no \w+"),
        (of_another_shape, r"layers\.0\.mlp\.experts\.\w+: its experts differ in shape"),
    ],
    ids=["one matrix missing", "last expert missing", "another shape"],
)
def test_experts_that_cannot_be_stacked_are_refused(mixtures, tmp_path, change, message):
    pack_one_by_one("gpt_oss", mixtures["gpt_oss"], tmp_path / "nf4")
    edit(tmp_path / "nf4", change)
    with pytest.raises(SourceError, match=message) as caught:
        nf4conv.dequantize(tmp_path / "nf4", tmp_path / "out", **CPU)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize("command", [nf4conv.dequantize, nf4conv.quantize])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(EXPERT), r"2\.up_proj\.weight is missing: of 4 experts of this layer 3 have it"),
        (without_last_expert, r"experts\.3\.\w+\.weight is missing: of 4 experts"),
        (of_another_shape, r"experts\.2\.\w+\.weight is \[\d+, \d+\], but .*0\.\w+_proj"),
    ],
    ids=["one matrix missing", "last expert missing", "another shape"],
)
def test_experts_that_stay_single_are_checked(mixtures, tmp_path, command, change, message):
    pack_one_by_one("qwen3_moe", mixtures["qwen3_moe"], tmp_path / "nf4")
    edit(tmp_path / "nf4", change)
    with pytest.raises(PlanError, match=message):
        command(tmp_path / "nf4", tmp_path / "out", **CPU)
    assert not (tmp_path / "out/config.json").exists()


def in_another_blocksize(tensors: dict[str, torch.Tensor]) -> None:
    without(EXPERT)(tensors)
    encode(tensors, EXPERT, torch.randn(96, 64, dtype=torch.bfloat16), blocksize=128)


def in_another_type(tensors: dict[str, torch.Tensor]) -> None:
    without(EXPERT)(tensors)
    encode(tensors, EXPERT, torch.randn(96, 64, dtype=torch.bfloat16), quant_type="fp4")


def in_16_bits(tensors: dict[str, torch.Tensor]) -> None:
    without(EXPERT)(tensors)
    tensors[EXPERT] = torch.randn(96, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "tensor", "text"),
    [
        (without(EXPERT), "layers.0.mlp.experts", "up_proj of 1 of 4 experts is missing: 2"),
        (without_last_expert, "layers.1.mlp.experts", "1 of 4 experts is missing: 3"),
        (of_another_shape, EXPERT, r"is in 4 bits, \[32, 64\], while most"),
        (in_another_blocksize, EXPERT, "blocks of 128, .* while most .* blocks of 64"),
        (in_another_type, EXPERT, "is fp4, .* while most .* are nf4"),
        (in_16_bits, EXPERT, r"is BF16 \[96, 64\], while most .* in 4 bits"),
    ],
    ids=["matrix missing", "expert missing", "shape", "blocksize", "type", "16 bits"],
)
def test_verify_names_experts_that_loaders_cannot_join(mixtures, tmp_path, change, tensor, text):
    pack_one_by_one("qwen3_moe", mixtures["qwen3_moe"], tmp_path / "nf4")
    good = nf4conv.verify(tmp_path / "nf4", **CPU)
    assert good.checks["experts"]
    edit(tmp_path / "nf4", change)
    report = nf4conv.verify(tmp_path / "nf4", **CPU)
    assert not report.checks["experts"]
    found = [finding for finding in report.findings if finding.check == "experts"]
    assert any(tensor in finding.tensor and re.search(text, finding.text) for finding in found), (
        found
    )
    assert not any("\n" in finding.line() for finding in found)


def test_a_stack_of_another_number_of_experts(mixtures, tmp_path):
    pack_stacked(mixtures["gpt_oss"], tmp_path / "nf4")
    assert nf4conv.verify(tmp_path / "nf4", **CPU).checks["experts"]
    stack = "model.layers.0.mlp.experts.down_proj"

    def with_another_expert(tensors: dict[str, torch.Tensor]) -> None:
        without(stack)(tensors)
        encode(tensors, stack, torch.randn(5, 64, 64, dtype=torch.bfloat16))

    edit(tmp_path / "nf4", with_another_expert)
    report = nf4conv.verify(tmp_path / "nf4", **CPU)
    [found] = [finding for finding in report.findings if finding.check == "experts"]
    assert found.line().endswith(f"{stack}: a stack of 5 experts, but config.json says 4")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_verify_names_the_expert_whose_codes_are_damaged(mixtures, tmp_path, family):
    nf4conv.quantize(mixtures[family], tmp_path / "out", moe="packed", **CPU)
    passed = nf4conv.verify(tmp_path / "out", source=mixtures[family], exact=True, **CPU)
    assert passed.passed, [finding.line() for finding in passed.findings]

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT][17] ^= 0x50

    edit(tmp_path / "out", damage)
    report = nf4conv.verify(tmp_path / "out", source=mixtures[family], **CPU)
    assert not report.passed
    assert {finding.tensor for finding in report.findings if finding.is_fault} == {EXPERT}


# --- what is told --------------------------------------------------------------------------------


LAYOUTS: dict[str, tuple[str, Callable[[Path, Path], object], str]] = {
    "packed": ("qwen3_moe", partial(pack_one_by_one, "qwen3_moe"), "one by one, .* vLLM's"),
    "packed, of a stack": ("gpt_oss", partial(pack_one_by_one, "gpt_oss"), "for this family"),
    "stacked": ("gpt_oss", pack_stacked, "as the stacks that they are, .* Unsloth read$"),
    "no experts in 4 bits": ("qwen3_moe", shutil.copytree, "^$"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inspect_says_which_layout_it_is_and_what_loads_it(mixtures, tmp_path, layout):
    family, make, expected = LAYOUTS[layout]
    make(mixtures[family], tmp_path / "out")
    found = nf4conv.inspect(tmp_path / "out")
    assert re.search(expected, found.experts), found.experts
    assert json.loads(to_json(found))["experts"] == found.experts
    shown = "\n".join(inspection_lines(found, None))
    assert found.experts in shown
    if layout != "no experts in 4 bits":
        assert "transformers 5 with nf4conv installed" in found.experts


# --- `verify --source` between layouts; parts and streams -----------------------------------------

ABOUT = ("components", "quant state", "layout", "one shard", "code maps", "uniform", "experts")
VALUES = ("scales", "names", "copies", "codes", "bound", "tolerance")


def pack_stacks_of_qwen3(source: Path, folder: Path) -> None:
    """As Unsloth does: stacks, of a family that stores experts one by one."""
    tensors = tensors_of(source)
    written: dict[str, torch.Tensor] = {}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        gate_up, down = [], []
        for expert in range(EXPERTS):
            gate = tensors.pop(f"{path}.{expert}.gate_proj.weight")
            gate_up.append(torch.cat([gate, tensors.pop(f"{path}.{expert}.up_proj.weight")]))
            down.append(tensors.pop(f"{path}.{expert}.down_proj.weight"))
        encode(written, f"{path}.gate_up_proj", torch.stack(gate_up))
        encode(written, f"{path}.down_proj", torch.stack(down))
    save(source, folder, written | tensors)


PACKED: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "one by one": ("gpt_oss", lambda source, out: pack_one_by_one("gpt_oss", source, out)),
    "stacked": ("gpt_oss", pack_stacked),
    "stacked qwen3": ("qwen3_moe", pack_stacks_of_qwen3),
}


@pytest.mark.parametrize("layout", PACKED)
def test_a_layout_beside_its_source(mixtures, tmp_path, layout):
    family, make = PACKED[layout]
    source, packed = mixtures[family], tmp_path / "nf4"
    make(source, packed)
    for a, b in ((source, packed), (packed, source)):
        assert compared(a, b, **CPU).within(0.12)
    report = nf4conv.verify(packed, source=source, **CPU)
    for name in (*ABOUT, *VALUES):
        faults = [finding.line() for finding in report.findings if finding.check == name]
        assert report.checks[name], faults
    assert {row.error is not None for row in report.weights} == {True}


@pytest.mark.parametrize("layout", PACKED)
def test_another_model_does_not_pass(mixtures, tmp_path, layout):
    family, make = PACKED[layout]
    make(make_mixture(family, tmp_path / "other", seed=1), tmp_path / "nf4")
    report = nf4conv.verify(tmp_path / "nf4", source=mixtures[family], **CPU)
    assert report.checks["names"]
    assert not report.checks["source"]
    assert not compared(tmp_path / "nf4", mixtures[family], **CPU).within(0.12)


def test_names_of_unsloth_are_refused_beside_the_source(mixtures, tmp_path):
    pack_as_unsloth_does_gpt_oss(mixtures["gpt_oss"], tmp_path / "nf4")
    with pytest.raises(PlanError, match="names that Unsloth gives them; `nf4conv dequantize`"):
        nf4conv.verify(tmp_path / "nf4", source=mixtures["gpt_oss"], **CPU)


def test_single_experts_beside_stacks_in_4_bits(mixtures, tmp_path):
    pack_one_by_one("gpt_oss", mixtures["gpt_oss"], tmp_path / "one")
    pack_stacked(mixtures["gpt_oss"], tmp_path / "stacked")
    for a, b in (("one", "stacked"), ("stacked", "one")):
        found = compared(tmp_path / a, tmp_path / b, **CPU)
        assert found.within(0.2)
        assert found.statuses["model.layers.0.mlp.experts.gate_up_proj"] == "different"


def test_a_stack_of_what_only_the_other_has_singly_is_reported(mixtures, tmp_path):
    pack_stacked(mixtures["gpt_oss"], tmp_path / "stacked")
    written = pack_one_by_one("gpt_oss", mixtures["gpt_oss"], tmp_path / "one")
    assert written
    found = tensors_of(tmp_path / "one")
    for key in [key for key in found if ".layers.0.mlp.experts.1." in key]:
        del found[key]
    save(mixtures["gpt_oss"], tmp_path / "less", found)
    assert not compared(tmp_path / "less", tmp_path / "stacked", **CPU).within(0.2)


def test_parts_make_the_bytes_of_the_whole(mixtures, tmp_path):
    source = mixtures["gpt_oss"]
    options = {"moe": "packed", "max_shard_size": 60_000}
    nf4conv.quantize(source, tmp_path / "packed", **options, **CPU)
    back = {"max_shard_size": 100_000}
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "whole", **back, **CPU)
    for part in ("1/2", "2/2"):
        run = {"device": "cpu", "workers": 1, "buffer_size": 65536, "part": part}
        nf4conv.dequantize(tmp_path / "packed", tmp_path / "parts", **back, **run)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2


def test_a_stream_from_the_hub_is_stacked_too(hub, mixtures, tmp_path):
    options = {"moe": "packed", "max_shard_size": 60_000}
    nf4conv.quantize(mixtures["gpt_oss"], tmp_path / "packed", **options, **CPU)
    nf4conv.dequantize(tmp_path / "packed", tmp_path / "expected", **CPU)
    hub.repos["org/packed"] = Repo()
    hub.repos["org/packed"].commit(contents(tmp_path / "packed"))
    where = {"stream": True, "cache_dir": tmp_path / "cache"}
    nf4conv.dequantize("org/packed", tmp_path / "out", **CPU, **where)
    assert_same_tensors(tmp_path / "out", tmp_path / "expected")
