"""Calibration: blocks one at a time, written like any other weight.

The models are tiny and random; transformers makes them, and loads what comes of them.
"""

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from calibrations import (
    CPU,
    LENGTH,
    Killed,
    assert_same_weights,
    divergence,
    gains_of,
    kill,
    make_model,
    make_text,
    options_for,
    record_of,
    weights_in,
)
from checkpoints import save_adapter, save_model, tensors_of
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.calibrate import block, calibrating
from nf4conv.calibrate.kept import KeptFiles
from nf4conv.cli import main
from nf4conv.errors import OutputError, SourceError
from nf4conv.sources.header import read_header


def test_it_diverges_less_than_a_search(model, text, made, searched):
    ids = torch.from_numpy(np.load(text)[-512:].astype(np.int64)).view(-1, LENGTH)
    assert divergence(model, made, ids) < 0.8 * divergence(model, searched, ids)


@pytest.mark.parametrize("outputs", ["qkv", "all"])
def test_gradients_at_outputs_are_those_of_the_whole_model(
    model, text, tmp_path, monkeypatch, outputs
):
    """Torch's own backward pass through the whole model says the same, given the same labels."""

    def most_likely(chances: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return chances.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", most_likely)
    monkeypatch.setattr(calibrating, "calibrate_block", kill)
    options = options_for(text, calibrate_output=outputs)
    plan = nf4conv.plan_quantize(model, **options, **CPU)
    with pytest.raises(Killed):
        plan.execute(tmp_path / "out")
    calibration = plan.made.calibration
    chosen = {target.job.name for found in calibration.targets.values() for target in found}

    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, __: Any, made: torch.Tensor) -> None:
            def add(gradient: torch.Tensor) -> None:
                rows = gradient.flatten(0, -2)
                sums[name] = sums.get(name, 0) + rows.T @ rows

            made.register_hook(add)

        return hook

    for name, module in whole.named_modules():
        if f"{name}.weight" in chosen:
            module.register_forward_hook(watch(f"{name}.weight"))
    ids = torch.from_numpy(calibration.calibrating)
    chances = whole(ids).logits.log_softmax(-1)
    chances.max(-1).values.sum().backward()

    kept = KeptFiles(tmp_path / "out/.nf4conv/calibrated", {})
    for number in range(2):
        found, _ = kept.read(f"outputs-{number:05d}")
        assert len(found) == (3 if outputs == "qkv" else 7)
        for name, mean in found.items():
            # float32 sums over all tokens, block by block and in one pass
            torch.testing.assert_close(mean, sums[name] / ids.numel(), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("outputs", ["qkv", "all"])
def test_rounding_with_a_view_to_outputs(
    model, text, made, with_outputs, searched, tmp_path, outputs
):
    out = with_outputs
    if outputs == "all":
        out = tmp_path / "out"
        nf4conv.quantize(model, out, **options_for(text, calibrate_output=outputs), **CPU)
    ids = torch.from_numpy(np.load(text)[-512:].astype(np.int64)).view(-1, LENGTH)
    assert divergence(model, out, ids) < 0.8 * divergence(model, searched, ids)
    assert "outputs" in record_of(out)["calibration"]["knows"]
    last = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(weights_in(out)[last], weights_in(made)[last])


@pytest.mark.parametrize("outputs", [None, "all"])
def test_what_held_out_windows_deny_keeps_the_search(
    model, text, searched, tmp_path, monkeypatch, outputs
):
    """With outputs it is the two-sided cost that judges, and never the error of a layer."""

    def equal(*_: Any) -> float:
        return 1.0

    def unasked(*_: Any) -> float:
        raise AssertionError("judged by another objective")

    monkeypatch.setattr(block, "layer_cost", unasked if outputs else equal)
    monkeypatch.setattr(block, "two_sided_cost", equal if outputs else unasked)
    options = options_for(text, calibrate_output=outputs)
    nf4conv.quantize(model, tmp_path / "out", **options, **CPU)
    assert_same_weights(searched, tmp_path / "out")
    assert {*gains_of(tmp_path / "out")} == {1.0}
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")])
    assert "14 of 14 weights keep the search" in shown.output


def test_the_record_says_by_what(text, made):
    record = record_of(made)
    asked = record["calibration"]
    assert asked["tokens"] == 1024
    [described] = asked["texts"]
    assert described["name"] == "ids.npy"
    assert len(described["sha256"]) == 64
    assert str(text) not in json.dumps(record)
    [group] = record["weights"]
    assert group["scales"] == "calibrated"
    assert group["origin"] == "packed"
    assert group["from"] == "bfloat16"
    made_by = record["calibrated"]["made_by"]
    assert made_by["transformers"] == transformers.__version__
    assert made_by["device"].startswith("cpu")
    gains = gains_of(made)
    assert len(gains) == group["count"] == 14
    assert max(gains) <= 1
    assert min(gains) < 0.9
    assert record["verified"]["largest_relative_error"] > 0.05
    shown = CliRunner().invoke(main, ["inspect", str(made)])
    assert "calibrated by 1,024 tokens of ids.npy" in shown.output
    assert "activations" in (made / "README.md").read_text()


def test_verify_accepts_it_and_notices_what_is_wrong(model, made, tmp_path):
    report = nf4conv.verify(made, source=model)
    assert report.passed
    assert {row.format.scales for row in report.weights} == {"calibrated"}
    other = make_model(tmp_path / "other", initializer_range=0.5)
    assert not nf4conv.verify(made, source=other).passed


def test_exact_proves_what_was_written(model, made, tmp_path):
    assert nf4conv.verify(made, source=model, exact=True).passed
    other = tmp_path / "other"
    shutil.copytree(made, other)
    name = "model.layers.1.self_attn.q_proj.weight"
    for file in other.glob("*.safetensors"):
        for tensor in read_header(file):
            if tensor.name == name:
                content = bytearray(file.read_bytes())
                content[tensor.start] ^= 1
                file.write_bytes(content)
    found = nf4conv.verify(other, source=model, exact=True)
    [fault] = [finding for finding in found.findings if finding.is_fault]
    assert "SHA-256" in fault.text
    record = record_of(other)
    del record["calibrated"]
    (other / "nf4conv.json").write_text(json.dumps(record))
    assert not nf4conv.verify(other, source=model, exact=True).passed


def test_other_commands_take_it(made, tmp_path):
    nf4conv.dequantize(made, tmp_path / "decoded")
    decoded = tensors_of(tmp_path / "decoded")
    for name, weight in weights_in(made).items():
        assert torch.equal(decoded[name], weight)
    nf4conv.quantize(made, tmp_path / "again", **CPU)
    group = record_of(tmp_path / "again")["weights"][0]
    assert group["scales"] == "calibrated"
    assert group["origin"] == "kept as found"


def test_a_rerun_finds_the_result(model, text, made):
    report = nf4conv.quantize(model, made, **options_for(text), **CPU)
    assert report.already_complete
    options = options_for(text, calibration_tokens=512)
    with pytest.raises(OutputError, match="calibration"):
        nf4conv.quantize(model, made, **options, **CPU)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.1.input_layernorm.weight", 1),
        ("model.embed_tokens.weight", 0),  # of one token, which not all windows have
    ],
)
def test_nan_is_named_by_block_and_module(name, layer, text, tmp_path):
    source = make_model(tmp_path / "model")
    file = next(file for file in source.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    tensors[name][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    error = rf"model\.layers\.{layer}\.self_attn\.q_proj\.weight: .*NaN"
    with pytest.raises(SourceError, match=error):
        nf4conv.quantize(source, tmp_path / "out", **options_for(text), **CPU)
    assert not (tmp_path / "out" / "config.json").exists()
    assert not list((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("lacking", "outputs", "error"),
    [
        ("transformer.wpe.weight", None, r"h\.0\.attn\.c_attn\.weight: .* were missing"),
        ("transformer.ln_f.weight", "qkv", "predicts NaN or infinity"),
    ],
)
def test_what_is_used_outside_the_blocks_must_be_there(lacking, outputs, error, text, tmp_path):
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": LENGTH}
    source = make_model(tmp_path / "model", "gpt2", **sizes)
    found = 0
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        found += tensors.pop(lacking, None) is not None
        save_file(tensors, file, metadata={"format": "pt"})
    for index in source.glob("*.index.json"):
        content = json.loads(index.read_text())
        del content["weight_map"][lacking]
        index.write_text(json.dumps(content))
    assert found
    options = options_for(text, calibrate_output=outputs)
    with pytest.raises(SourceError, match=error):
        nf4conv.quantize(source, tmp_path / "out", **options, **CPU)


def test_a_source_that_changes_meanwhile(text, tmp_path, monkeypatch):
    source = make_model(tmp_path / "model")
    plan = nf4conv.plan_quantize(source, **options_for(text), **CPU)
    original = calibrating.calibrate_block

    def changed(*arguments: Any) -> Any:
        for file in source.glob("*.safetensors"):
            file.touch()
        return original(*arguments)

    monkeypatch.setattr(calibrating, "calibrate_block", changed)
    with pytest.raises(SourceError, match="changed while it was read"):
        plan.execute(tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [
        {"quant_type": "fp4", "blocksize": 32},
        {"double_quant": False, "quant_storage": "bfloat16"},
        {"include": ("*layers.1.*",), "exclude": ("*down_proj*",)},
        {"dtype": "float16", "blocksize": 128},
    ],
    ids=str,
)
def test_formats(model, text, tmp_path, changes):
    out = tmp_path / "out"
    run = {"device": "cpu", "verify": True}
    nf4conv.quantize(model, out, **options_for(text, **changes), **run)
    assert nf4conv.verify(out, source=model, exact=True).passed
    groups = {group["scales"]: group["count"] for group in record_of(out)["weights"]}
    if "include" in changes:
        assert groups == {"calibrated": 6}
    elif changes["blocksize" if "blocksize" in changes else "quant_storage"] == 128:
        # rows of 64 elements are no whole blocks of 128, but those of down_proj are
        assert groups == {"search": 12, "calibrated": 2}
    else:
        assert groups == {"calibrated": 14}


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8},
    "phi": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    "bert": {"is_decoder": True},
    "mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_families(kind, text, tmp_path):
    source = make_model(tmp_path / "model", kind, **FAMILIES[kind])
    nf4conv.quantize(source, tmp_path / "out", **options_for(text), **CPU)
    record = record_of(tmp_path / "out")
    assert {group["scales"] for group in record["weights"]} == {"calibrated"}
    gains = gains_of(tmp_path / "out")
    assert sum(gains) / len(gains) < 0.8
    assert nf4conv.verify(tmp_path / "out", source=source).passed


def test_experts_that_few_tokens_reach_are_counted(tmp_path):
    source = make_model(tmp_path / "model", "mixtral", num_local_experts=8)
    text = make_text(tmp_path / "ids.npy", tokens=1000)
    options = options_for(text, calibration_tokens=512)
    nf4conv.quantize(source, tmp_path / "out", **options, **CPU)
    few = {}
    for of_block in record_of(tmp_path / "out")["calibrated"]["blocks"]:
        few |= of_block.get("few_tokens", {})
    assert few
    assert all(0 <= tokens < 256 and ".experts." in name for name, tokens in few.items())


def test_adapters_are_merged_first(model, text, tmp_path):
    adapter = tmp_path / "adapter"
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        factors[f"{module}.lora_A.weight"] = torch.randn((4, 64), generator=generator) / 8
        factors[f"{module}.lora_B.weight"] = torch.randn((64, 4), generator=generator) / 8
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    save_adapter(adapter, factors, config)
    lora = (str(adapter),)
    merged = tmp_path / "merged"
    nf4conv.dequantize(model, merged, lora=lora, **CPU)
    nf4conv.quantize(merged, tmp_path / "expected", **options_for(text), **CPU)
    nf4conv.quantize(model, tmp_path / "out", **options_for(text, lora=lora), **CPU)
    assert_same_weights(tmp_path / "expected", tmp_path / "out")


def test_encoded_sources_are_decoded_first(model, text, tmp_path):
    encoded: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors_of(model).items():
        encoded[name] = decoded[name] = tensor
        if "_proj" in name:
            values = (tensor.float() * 4).to(torch.float8_e4m3fn)
            encoded[name] = values
            encoded[f"{name}_scale_inv"] = torch.tensor(0.25)
            decoded[name] = (values.float() * 0.25).bfloat16()
    config = json.loads((model / "config.json").read_text())
    for kind, content in (("encoded", encoded), ("decoded", decoded)):
        folder = tmp_path / kind
        of_kind = {**config, "quantization_config": {"quant_method": "fp8"}}
        save_model(folder, content, of_kind if kind == "encoded" else config)
        nf4conv.quantize(folder, tmp_path / f"{kind}-out", **options_for(text), **CPU)
    expected = weights_in(tmp_path / "decoded-out")
    found = weights_in(tmp_path / "encoded-out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
