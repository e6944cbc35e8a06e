"""Calibration: blocks one at a time, kept as they are finished, written like any other weight.

The models are tiny and random; transformers makes them, and loads what comes of them.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

import nf4conv
from nf4conv.calibrate import block, calibrating, gradients
from nf4conv.cli import main
from nf4conv.errors import Nf4convError, OutputError, PlanError, SourceError
from nf4conv.options import QuantizeOptions, RunOptions, VerifyOptions
from nf4conv.sources.header import read_header
from nf4conv.sources.opening import open_source

VOCABULARY = 96
LENGTH = 32
CPU = RunOptions(device="cpu")


def make_model(folder: Path, kind: str = "llama", **changes: Any) -> Path:
    """Saves a random model with two blocks."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for parameter in model.parameters():  # inputs of very unequal size, as real models have
        if parameter.dim() == 2:
            parameter.data.mul_(1 + 3 * torch.rand(parameter.shape[1]) ** 4)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def make_text(path: Path, tokens: int = 3000, seed: int = 0) -> Path:
    """Writes token ids."""
    generator = np.random.default_rng(seed)
    np.save(path, (generator.random(tokens) ** 2 * VOCABULARY).astype(np.int32))
    return path


def options_for(text: Path, **changes: Any) -> QuantizeOptions:
    return QuantizeOptions(calibrate=(str(text),), calibration_tokens=1024, **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text(tmp_path_factory.mktemp("text") / "ids.npy")


@pytest.fixture(scope="module")
def made(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    nf4conv.quantize_checkpoint(
        model, out, options_for(text), RunOptions(device="cpu", verify=True)
    )
    return out


def record_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "nf4conv.json").read_text())
    return found


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a checkpoint, decoded by nf4conv."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    found = {}
    for name, tensor in tensors.items():
        parts = {other: part for other, part in tensors.items() if other.startswith(f"{name}.")}
        if parts:
            state = nf4conv.QuantState.from_components(parts)
            found[name] = nf4conv.dequantize_4bit(tensor, state)
    return found


def divergence(model: Path, out: Path, ids: torch.Tensor) -> float:
    """Returns the mean divergence of a checkpoint's predictions, its weights decoded by us."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    original = load(model, dtype=torch.float32)
    with torch.no_grad():
        before = original(ids).logits.log_softmax(-1)
        original.load_state_dict(weights_in(out), strict=False)
        after = original(ids).logits.log_softmax(-1)
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_it_diverges_less_than_a_search(model, text, made, tmp_path):
    searched = tmp_path / "searched"
    nf4conv.quantize_checkpoint(model, searched, QuantizeOptions(scales="search"), CPU)
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
    monkeypatch.setattr(calibrating, "calibrate_block", _kill)
    options = options_for(text, calibrate_output=outputs)
    plan = nf4conv.plan_quantization(model, options)
    with pytest.raises(_Killed):
        nf4conv.execute_quantization(plan, tmp_path / "out", CPU)

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
        if f"{name}.weight" in plan.calibration.weights:
            module.register_forward_hook(watch(f"{name}.weight"))
    windows = plan.calibration.windows
    ids = torch.from_numpy(windows.ids[: windows.calibrating])
    chances = whole(ids).logits.log_softmax(-1)
    chances.max(-1).values.sum().backward()

    session = calibrating.Session(plan, torch.device("cpu"), tmp_path / "out/.nf4conv/calibrated")
    for number in range(2):
        found = gradients.OutputMoments(session).of_block(number)
        assert len(found) == (3 if outputs == "qkv" else 7)
        for name, mean in found.items():
            # float32 sums over all tokens, block by block and in one pass
            torch.testing.assert_close(mean, sums[name] / ids.numel(), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("outputs", ["qkv", "all"])
def test_rounding_with_a_view_to_outputs(model, text, made, tmp_path, outputs):
    out = tmp_path / "out"
    searched = tmp_path / "searched"
    nf4conv.quantize_checkpoint(model, searched, QuantizeOptions(scales="search"), CPU)
    nf4conv.quantize_checkpoint(model, out, options_for(text, calibrate_output=outputs), CPU)
    ids = torch.from_numpy(np.load(text)[-512:].astype(np.int64)).view(-1, LENGTH)
    assert divergence(model, out, ids) < 0.8 * divergence(model, searched, ids)
    assert "outputs" in record_of(out)["calibration"]["knows"]
    last = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(weights_in(out)[last], weights_in(made)[last])


def test_a_backward_pass_that_was_killed_ends_in_the_same_bytes(model, text, tmp_path, monkeypatch):
    options = options_for(text, calibrate_output="qkv")
    nf4conv.quantize_checkpoint(model, tmp_path / "whole", options, CPU)
    for name, place in (("_keep", gradients.OutputMoments), ("calibrate_block", calibrating)):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, _kill)
            with pytest.raises(_Killed):
                nf4conv.quantize_checkpoint(model, tmp_path / "out", options, CPU)
    nf4conv.quantize_checkpoint(model, tmp_path / "out", options, CPU)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("outputs", [None, "all"])
def test_what_held_out_windows_deny_keeps_the_search(model, text, tmp_path, monkeypatch, outputs):
    """With outputs it is the two-sided cost that judges, and never the error of a layer."""

    def equal(*_: Any) -> float:
        return 1.0

    def unasked(*_: Any) -> float:
        raise AssertionError("judged by another objective")

    monkeypatch.setattr(block, "layer_cost", unasked if outputs else equal)
    monkeypatch.setattr(block, "two_sided_cost", equal if outputs else unasked)
    nf4conv.quantize_checkpoint(model, tmp_path / "searched", QuantizeOptions(scales="search"), CPU)
    options = options_for(text, calibrate_output=outputs)
    nf4conv.quantize_checkpoint(model, tmp_path / "out", options, CPU)
    for file in (tmp_path / "searched").glob("*.safetensors"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    blocks = record_of(tmp_path / "out")["calibrated"]["blocks"]
    assert {gain for of in blocks for gain in of["gains"].values()} == {1.0}
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "out")])
    assert "14 of 14 weights keep the search" in shown.output


def test_the_record_says_by_what(text, made):
    record = record_of(made)
    asked = record["calibration"]
    assert asked["tokens"] == 1024
    assert asked["seed"] == 0
    assert asked["texts"][0]["name"] == "ids.npy"
    assert len(asked["texts"][0]["sha256"]) == 64
    assert str(text) not in json.dumps(record)
    [group] = record["weights"]
    assert group["scales"] == "calibrated"
    assert group["origin"] == "packed"
    assert group["from"] == "bfloat16"
    found = record["calibrated"]
    assert found["made_by"]["transformers"] == transformers.__version__
    assert found["made_by"]["device"].startswith("cpu")
    gains = [gain for block in found["blocks"] for gain in block["gains"].values()]
    assert len(gains) == group["count"] == 14
    assert max(gains) <= 1
    assert min(gains) < 0.9
    assert record["verified"]["largest_relative_error"] > 0.05


def test_verify_accepts_it_and_notices_what_is_wrong(model, made, tmp_path):
    report = nf4conv.verify_checkpoint(made, model)
    assert report.passed
    assert report.settings.scales == "calibrated"
    other = make_model(tmp_path / "other", initializer_range=0.5)
    assert not nf4conv.verify_checkpoint(made, other).passed
    strict = nf4conv.verify_checkpoint(made, model, VerifyOptions(tolerance=0.05))
    assert not strict.passed


def test_exact_proves_what_was_written(model, made, tmp_path):
    assert nf4conv.verify_checkpoint(made, model, VerifyOptions(exact=True)).passed
    other = tmp_path / "other"
    shutil.copytree(made, other)
    name = "model.layers.1.self_attn.q_proj.weight"
    for file in other.glob("*.safetensors"):
        for tensor in read_header(file):
            if tensor.name == name:
                content = bytearray(file.read_bytes())
                content[tensor.start] ^= 1
                file.write_bytes(content)
    found = nf4conv.verify_checkpoint(other, model, VerifyOptions(exact=True))
    [fault] = [finding for finding in found.findings if finding.is_fault]
    assert "SHA-256" in fault.text
    record = record_of(other)
    del record["calibrated"]
    (other / "nf4conv.json").write_text(json.dumps(record))
    assert not nf4conv.verify_checkpoint(other, model, VerifyOptions(exact=True)).passed


def test_inspect_and_card_say_so(made):
    inspection = nf4conv.inspect_checkpoint(made)
    done = subprocess.run(
        [sys.executable, "-m", "nf4conv", "inspect", str(made)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert inspection.made is not None
    assert "calibrated by 1,024 tokens of ids.npy" in done.stdout
    assert "activations" in (made / "README.md").read_text()


def test_other_commands_take_it(made, tmp_path):
    nf4conv.dequantize_checkpoint(made, tmp_path / "decoded")
    from safetensors.torch import load_file

    decoded: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "decoded").glob("*.safetensors"):
        decoded |= load_file(file)
    for name, weight in weights_in(made).items():
        assert torch.equal(decoded[name], weight)
    nf4conv.quantize_checkpoint(made, tmp_path / "again", QuantizeOptions(), CPU)
    group = record_of(tmp_path / "again")["weights"][0]
    assert group["scales"] == "calibrated"
    assert group["origin"] == "kept as found"


def test_a_rerun_finds_the_result(model, text, made):
    report = nf4conv.quantize_checkpoint(model, made, options_for(text), CPU)
    assert report.already_complete
    with pytest.raises(OutputError, match="calibration"):
        nf4conv.quantize_checkpoint(model, made, options_for(text, calibration_seed=1), CPU)


class _Killed(BaseException):
    """Stands for a kill."""


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_a_run_that_was_killed_ends_in_the_same_bytes(
    model, text, made, tmp_path, monkeypatch, finished
):
    out = tmp_path / "out"
    original = calibrating.FinishedBlocks.write

    def write(self: Any, number: int, *rest: Any) -> None:
        if number == finished:
            raise _Killed
        original(self, number, *rest)

    with monkeypatch.context() as patched:
        if finished < 2:
            patched.setattr(calibrating.FinishedBlocks, "write", write)
        else:
            patched.setattr(calibrating, "with_calibrated_weights", _kill)
        with pytest.raises(_Killed):
            nf4conv.quantize_checkpoint(model, out, options_for(text), CPU)
    assert not (out / "config.json").exists()
    kept = [path.read_bytes() for path in sorted(out.glob(".nf4conv/calibrated/*.safetensors"))]
    assert len(kept) == finished
    nf4conv.quantize_checkpoint(model, out, options_for(text), CPU)
    for file in made.glob("*.safetensors"):
        assert (out / file.name).read_bytes() == file.read_bytes()
    assert not (out / ".nf4conv").exists()


def _kill(*_: object) -> None:
    raise _Killed


def test_an_interrupted_run_is_not_continued_with_another_text(model, text, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(calibrating, "with_calibrated_weights", _kill)
        with pytest.raises(_Killed):
            nf4conv.quantize_checkpoint(model, tmp_path / "out", options_for(text), CPU)
    other = make_text(tmp_path / "ids.npy", seed=1)
    with pytest.raises(OutputError, match="differs in"):
        nf4conv.quantize_checkpoint(model, tmp_path / "out", options_for(other), CPU)


def test_hidden_states_on_disk_change_no_byte(model, text, made, tmp_path):
    out = tmp_path / "out"
    nf4conv.quantize_checkpoint(model, out, options_for(text, calibration_memory=1000), CPU)
    for file in made.glob("*.safetensors"):
        assert (out / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("empty.txt", b"", "tokenizer|no tokens"),
        ("binary.txt", b"\xff\xfe\x00\x01", "tokenizer|UTF-8"),
        ("short.npy", np.arange(20), "too few"),
        ("floats.npy", np.ones(4000), "integers"),
        ("table.npy", np.ones((40, 100), dtype=np.int64), "one dimension"),
        ("unknown.npy", np.full(4000, VOCABULARY), "token id 96"),
        ("damaged.npy", b"no array", "no array"),
        ("text.pdf", b"%PDF", "ends in"),
    ],
)
def test_texts_that_cannot_calibrate(model, tmp_path, name, content, error):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(PlanError, match=error):
        nf4conv.plan_quantization(model, options_for(path))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"calibrate": ("wikitext/wikitext-2",)}, "data set on the Hub is not fetched"),
        ({"calibrate": ("missing.txt",)}, "no such file"),
        ({"scales": "absmax"}, "scales='absmax'"),
        ({"calibration_tokens": 10}, "calibration_tokens=10"),
    ],
)
def test_options_that_do_not_go_together(model, text, changes, error):
    options = QuantizeOptions(**{"calibrate": (str(text),), **changes})
    with pytest.raises(PlanError, match=error):
        nf4conv.plan_quantization(model, options)


def test_it_is_not_done_in_parts(model, text, tmp_path):
    for run in (RunOptions(part="1/2"), RunOptions(ray=True)):
        with pytest.raises(PlanError, match="does not go with calibrate"):
            nf4conv.quantize_checkpoint(model, tmp_path / "out", options_for(text), run)


def test_a_model_that_transformers_does_not_know(text, tmp_path):
    source = make_model(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    config["architectures"] = ["NobodysModel"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match="has no NobodysModel"):
        nf4conv.plan_quantization(source, options_for(text))


def test_nan_is_named_by_block_and_module(text, tmp_path):
    from safetensors.torch import load_file, save_file

    source = make_model(tmp_path / "model")
    name = "model.layers.1.input_layernorm.weight"
    file = next(file for file in source.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    tensors[name][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"model\.layers\.1\.self_attn\.q_proj: .*NaN"):
        nf4conv.quantize_checkpoint(source, tmp_path / "out", options_for(text), CPU)
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_source_that_changes_meanwhile(text, tmp_path, monkeypatch):
    source = make_model(tmp_path / "model")
    plan = nf4conv.plan_quantization(source, options_for(text))
    original = calibrating.calibrate_block

    def changed(*arguments: Any) -> Any:
        for file in source.glob("*.safetensors"):
            file.touch()
        return original(*arguments)

    monkeypatch.setattr(calibrating, "calibrate_block", changed)
    with pytest.raises(SourceError, match="changed while it was read"):
        nf4conv.execute_quantization(plan, tmp_path / "out", CPU)


def test_memory_that_does_not_suffice_is_one_line(model, text, tmp_path, monkeypatch):
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(calibrating, "calibrate_block", fails)
    with pytest.raises(Nf4convError, match="out of memory while calibrating"):
        nf4conv.quantize_checkpoint(model, tmp_path / "out", options_for(text), CPU)


def test_the_plan_reads_no_weight(model, text):
    plan = nf4conv.plan_quantization(model, options_for(text))
    assert any("calibration: 14 weights in 2 blocks" in note for note in plan.notes)
    source = open_source(model)
    assert {tensor.name for tensor in source.tensors} >= plan.calibration.weights


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
    run = RunOptions(device="cpu", verify=True)
    nf4conv.quantize_checkpoint(model, out, options_for(text, **changes), run)
    assert nf4conv.verify_checkpoint(out, model, VerifyOptions(exact=True)).passed
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
    "gpt_neox": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    "bert": {"is_decoder": True},
    "mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_families(kind, text, tmp_path):
    source = make_model(tmp_path / "model", kind, **FAMILIES[kind])
    moe = "packed" if kind == "mixtral" else None
    nf4conv.quantize_checkpoint(source, tmp_path / "out", options_for(text, moe=moe), CPU)
    record = record_of(tmp_path / "out")
    assert {group["scales"] for group in record["weights"]} == {"calibrated"}
    blocks = record["calibrated"]["blocks"]
    gains = [gain for block in blocks for gain in block["gains"].values()]
    assert sum(gains) / len(gains) < 0.8
    assert nf4conv.verify_checkpoint(tmp_path / "out", source).passed


def test_experts_that_few_tokens_reach_are_counted(tmp_path):
    source = make_model(tmp_path / "model", "mixtral", num_local_experts=8)
    text = make_text(tmp_path / "ids.npy", tokens=1000)
    options = QuantizeOptions(
        calibrate=(str(text),), calibration_tokens=512, moe="packed", calibration_seed=3
    )
    nf4conv.quantize_checkpoint(source, tmp_path / "out", options, CPU)
    few = {}
    for of_block in record_of(tmp_path / "out")["calibrated"]["blocks"]:
        few |= of_block.get("few_tokens", {})
    assert few
    assert all(0 <= tokens < 256 and ".experts." in name for name, tokens in few.items())


def test_text_goes_through_the_tokenizer(model, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(model, source)
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(97 + number): number for number in range(26)}
    tokenizer = Tokenizer(models.WordLevel({**letters, "?": 26}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for message in messages %}z{{ message.content }}{% endfor %}"
    fast.save_pretrained(source)
    prose = tmp_path / "prose.txt"
    prose.write_text("abc" * 1000)
    chats = tmp_path / "chats.jsonl"
    lines = [{"messages": [{"role": "user", "content": "xy" * 200}]}] * 5
    chats.write_text("\n".join(json.dumps(line) for line in lines))
    options = QuantizeOptions(calibrate=(f"{prose}=3", str(chats)), calibration_tokens=1024)
    plan = nf4conv.plan_quantization(source, options)
    ids = plan.calibration.windows.ids
    shares = [(ids < 3).mean(), (ids > 22).mean()]
    assert 0.7 < shares[0] < 0.8
    assert 0.2 < shares[1] < 0.3
    assert nf4conv.plan_quantization(source, QuantizeOptions(calibrate=("default",)))


def test_adapters_are_merged_first(model, text, tmp_path):
    from safetensors.torch import save_file

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    generator = torch.Generator().manual_seed(0)
    factors = {}
    for layer in range(2):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        factors[f"{module}.lora_A.weight"] = torch.randn((4, 64), generator=generator) / 8
        factors[f"{module}.lora_B.weight"] = torch.randn((64, 4), generator=generator) / 8
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    lora = (str(adapter),)
    merged = tmp_path / "merged"
    nf4conv.dequantize_checkpoint(model, merged, nf4conv.DequantizeOptions(lora=lora), CPU)
    nf4conv.quantize_checkpoint(merged, tmp_path / "expected", options_for(text), CPU)
    nf4conv.quantize_checkpoint(model, tmp_path / "out", options_for(text, lora=lora), CPU)
    expected = weights_in(tmp_path / "expected")
    found = weights_in(tmp_path / "out")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_encoded_sources_are_decoded_first(model, text, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for file in model.glob("*.safetensors"):
        tensors |= load_file(file)
    encoded: dict[str, torch.Tensor] = {}
    decoded: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        encoded[name] = decoded[name] = tensor
        if "_proj" in name:
            values = (tensor.float() * 4).to(torch.float8_e4m3fn)
            encoded[name] = values
            encoded[f"{name}_scale_inv"] = torch.tensor(0.25)
            decoded[name] = (values.float() * 0.25).bfloat16()
    config = json.loads((model / "config.json").read_text())
    results = []
    for kind, content in (("encoded", encoded), ("decoded", decoded)):
        folder = tmp_path / kind
        folder.mkdir()
        save_file(content, folder / "model.safetensors")
        of_kind = {**config, "quantization_config": {"quant_method": "fp8"}}
        (folder / "config.json").write_text(json.dumps(of_kind if kind == "encoded" else config))
        nf4conv.quantize_checkpoint(folder, tmp_path / f"{kind}-out", options_for(text), CPU)
        results.append(weights_in(tmp_path / f"{kind}-out"))
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
