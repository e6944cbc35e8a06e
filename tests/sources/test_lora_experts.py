"""Adapters of experts, against PEFT."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters import load, make_model, merged_by_peft, train
from packed_experts import make_mixture, pack_as_unsloth_does_gpt_oss, pack_one_by_one, pack_stacked
from peft import LoraConfig, get_peft_model

import nf4conv
from nf4conv.commands.planning import make_plan
from nf4conv.errors import SourceError
from nf4conv.options import DequantizeOptions

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

CPU = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}
RANK, EXPERTS = 3, 4
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("base"), "qwen3_moe")


@pytest.fixture(scope="module")
def of_peft(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter as PEFT saves it."""
    folder = tmp_path_factory.mktemp("adapter")
    train(load(base), folder, r=RANK, target_modules=["q_proj"], target_parameters=PARAMETERS)
    return folder


def configure(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def changed(adapter: Path, tmp_path: Path, **changes: Any) -> Path:
    """Returns a copy of an adapter with other values in its config."""
    folder = Path(shutil.copytree(adapter, tmp_path / "changed"))
    configure(folder, **changes)
    return folder


def merged(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    nf4conv.dequantize(base, out, lora=(str(adapter),), **CPU)
    return load(out).state_dict()


def is_close(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(
        torch.allclose(found[name], value, rtol=0, atol=2e-6) for name, value in expected.items()
    )


def test_an_adapter_of_peft_is_merged_as_peft_merges_it(base, of_peft, tmp_path):
    expected = merged_by_peft(load(base), of_peft).state_dict()
    assert is_close(merged(base, of_peft, tmp_path / "out"), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_mapping": {"unsloth_fixed": True}},
        {"auto_mapping": None, "base_model_name_or_path": "unsloth/Qwen3-30B-A3B"},
        {"lora_B_layout": "grouped_by_expert"},
    ],
    ids=["mark", "base", "order"],
)
def test_an_adapter_of_unsloth_in_its_old_order_is_refused(base, of_peft, tmp_path, changes):
    adapter = str(changed(of_peft, tmp_path, **changes))
    with pytest.raises(SourceError, match=r"lora_B_layout .* has to be rank_major"):
        make_plan(base, DequantizeOptions(lora=(adapter,)))


def test_its_card_tells_too(base, of_peft, tmp_path):
    adapter = changed(of_peft, tmp_path, auto_mapping=None)
    (adapter / "README.md").write_text("---\ntags:\n- unsloth\n---\n")
    with pytest.raises(SourceError, match="has to be rank_major"):
        nf4conv.plan_quantize(base, lora=(str(adapter),))


def test_an_adapter_of_unsloth_in_the_order_of_peft_says_so(base, of_peft, tmp_path):
    expected = merged_by_peft(load(base), of_peft).state_dict()
    mark = {"auto_mapping": {"unsloth_fixed": True}, "lora_B_layout": "rank_major"}
    marked = changed(of_peft, tmp_path, **mark)
    assert is_close(merged(base, marked, tmp_path / "1"), expected)


def test_an_adapter_of_unsloth_without_experts_needs_no_order(base, tmp_path):
    train(load(base), tmp_path / "adapter", target_modules=["q_proj"])
    configure(tmp_path / "adapter", auto_mapping={"unsloth_fixed": True})
    make_plan(base, DequantizeOptions(lora=(str(tmp_path / "adapter"),)))


def test_one_rank_needs_no_order(base, tmp_path):
    train(load(base), tmp_path / "adapter", r=1, target_parameters=PARAMETERS)
    configure(tmp_path / "adapter", auto_mapping={"unsloth_fixed": True})
    expected = merged_by_peft(load(base), tmp_path / "adapter").state_dict()
    assert is_close(merged(base, tmp_path / "adapter", tmp_path / "out"), expected)


# --- experts that are in 4 bits, in every layout --------------------------------------------------

OF_GRANITE = ["experts.gate_up_proj", "experts.down_proj"]
CASES = [
    ("qwen3_moe", "one by one"),
    ("mixtral", "one by one"),
    ("gpt_oss", "one by one"),
    ("gpt_oss", "stacked"),
    ("gpt_oss", "unsloth"),
    ("granitemoe", "one by one"),
    ("granitemoe", "stacked"),
]


def pack(family: str, layout: str, source: Path, folder: Path) -> None:
    if layout == "one by one":
        pack_one_by_one(family, source, folder)
    elif layout == "stacked":
        pack_stacked(source, folder)
    else:
        pack_as_unsloth_does_gpt_oss(source, folder)


def make_adapter(base: Path, family: str, folder: Path) -> None:
    """An adapter of random factors, which is large enough to be seen in every element."""
    torch.manual_seed(5)
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        init_lora_weights=False,
        target_modules=["q_proj"],
        target_parameters=OF_GRANITE if family == "granitemoe" else PARAMETERS,
    )
    get_peft_model(load(base, dtype=torch.bfloat16), config).save_pretrained(folder)


def assert_close(ours: Path, theirs: torch.nn.Module) -> None:
    found, expected = load(ours, dtype=torch.bfloat16).state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).abs().max()
        assert difference <= value.double().abs().max() * 2**-7, name


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_adapter_of_experts_is_merged_into_packed_ones(tmp_path, family, layout):
    source = make_mixture(family, tmp_path / "source")
    pack(family, layout, source, tmp_path / "nf4")
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "plain", **CPU)
    make_adapter(tmp_path / "plain", family, tmp_path / "adapter")
    options = {"lora": (str(tmp_path / "adapter"),)}
    nf4conv.dequantize(tmp_path / "nf4", tmp_path / "merged", **options, **CPU)
    plain = load(tmp_path / "plain", dtype=torch.bfloat16)
    assert_close(tmp_path / "merged", merged_by_peft(plain, tmp_path / "adapter"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_is_merged_and_packed_is_what_the_merged_model_packs_to(tmp_path, family):
    source = make_mixture(family, tmp_path / "source")
    make_adapter(source, family, tmp_path / "adapter")
    lora = (str(tmp_path / "adapter"),)
    nf4conv.dequantize(source, tmp_path / "merged", lora=lora, **CPU)
    options = {"moe": "packed", "lora": lora}
    nf4conv.quantize(source, tmp_path / "out", **options, **CPU)
    exact = {"exact": True}
    report = nf4conv.verify(tmp_path / "out", source=tmp_path / "merged", **exact, **CPU)
    assert report.passed, [finding.line() for finding in report.findings]
    report = nf4conv.verify(tmp_path / "out", source=source, exact=True, lora=lora, **CPU)
    assert report.passed, [finding.line() for finding in report.findings]
