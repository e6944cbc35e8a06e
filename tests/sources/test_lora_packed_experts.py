"""`--lora` on experts that are in 4 bits, in every layout, against PEFT on the decoded model."""

from pathlib import Path

import pytest
import torch
import transformers
from adapters import load, merged_by_peft
from api import dequantize_checkpoint, quantize_checkpoint, verify_checkpoint
from packed_experts import make_mixture, pack_as_unsloth_does_gpt_oss, pack_one_by_one, pack_stacked
from peft import LoraConfig, get_peft_model

from nf4conv.options import DequantizeOptions, QuantizeOptions, RunOptions, VerifyOptions

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

CPU = RunOptions(device="cpu", workers=2, buffer_size=2 * 65536)
PARAMETERS = {
    "granitemoe": ["experts.gate_up_proj", "experts.down_proj"],
    "mixtral": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
USUAL = PARAMETERS["mixtral"]

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
        target_parameters=PARAMETERS.get(family, USUAL),
    )
    get_peft_model(load(base, dtype=torch.bfloat16), config).save_pretrained(folder)


def assert_close(ours: Path, theirs: torch.nn.Module) -> None:
    found, expected = load(ours, dtype=torch.bfloat16).state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name].double() - value.double()).abs().max()
        assert difference <= value.double().abs().max() * 2**-7, name


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_an_adapter_of_experts_is_merged_into_packed_ones(tmp_path, family, layout):
    source = make_mixture(family, tmp_path / "source")
    pack(family, layout, source, tmp_path / "nf4")
    dequantize_checkpoint(tmp_path / "nf4", tmp_path / "plain", run=CPU)
    make_adapter(tmp_path / "plain", family, tmp_path / "adapter")
    options = DequantizeOptions(lora=(str(tmp_path / "adapter"),))
    dequantize_checkpoint(tmp_path / "nf4", tmp_path / "merged", options, CPU)
    plain = load(tmp_path / "plain", dtype=torch.bfloat16)
    assert_close(tmp_path / "merged", merged_by_peft(plain, tmp_path / "adapter"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_what_is_merged_and_packed_is_what_the_merged_model_packs_to(tmp_path, family):
    source = make_mixture(family, tmp_path / "source")
    make_adapter(source, family, tmp_path / "adapter")
    lora = (str(tmp_path / "adapter"),)
    dequantize_checkpoint(source, tmp_path / "merged", DequantizeOptions(lora=lora), CPU)
    options = QuantizeOptions(moe="packed", lora=lora)
    quantize_checkpoint(source, tmp_path / "out", options, CPU)
    exact = VerifyOptions(exact=True)
    report = verify_checkpoint(tmp_path / "out", tmp_path / "merged", exact, CPU)
    assert report.passed, [finding.line() for finding in report.findings]
    report = verify_checkpoint(tmp_path / "out", source, VerifyOptions(exact=True, lora=lora), CPU)
    assert report.passed, [finding.line() for finding in report.findings]
