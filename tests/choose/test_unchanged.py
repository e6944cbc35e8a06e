"""4-bit sources: what is in the format asked for stays bit for bit; what others did wrong around it
is repaired.
"""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import load, make_model
from checkpoints import assert_same_tensors, save_model, tensors_of, write_source
from click.testing import CliRunner
from comparing import compared
from four_bit import pack, write
from transformers import BitsAndBytesConfig

import nf4conv
from nf4conv.cli import main
from nf4conv.errors import PlanError, SourceError
from nf4conv.format.codebook import CODEBOOKS
from nf4conv.format.layout import COMPONENT_SUFFIXES

CPU = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536}
NAMES = [f"model.layers.0.{name}.weight" for name in ("self_attn.q_proj", "mlp.up_proj")]
STORAGES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def weights(**options: Any) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        pack(name, torch.randn(96, 128, generator=generator).bfloat16(), **options)
        for name in NAMES
    ]


def kept() -> dict[str, torch.Tensor]:
    return {
        "model.embed_tokens.weight": torch.ones(256, 128).bfloat16(),
        "lm_head.weight": torch.ones(256, 128).bfloat16(),
    }


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


FORMATS = [
    {"quant_type": "nf4", "blocksize": 64, "double_quant": True},
    {"quant_type": "nf4", "blocksize": 128, "double_quant": False},
    {"quant_type": "fp4", "blocksize": 32, "double_quant": True},
]


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: "-".join(map(str, format.values())))
def test_options_that_are_left_out_are_those_of_the_source(tmp_path, format):
    source = write(tmp_path / "source", *weights(**format), kept())
    report = nf4conv.quantize(source, tmp_path / "out", **CPU)
    assert_same_tensors(tmp_path / "out", source)
    assert any(
        "of 2 weights in 4 bits 2 stay as they are, bit for bit" in note for note in report.notes
    )
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["bnb_4bit_quant_type"] == format["quant_type"]
    assert config["bnb_4bit_use_double_quant"] == format["double_quant"]
    assert report.totals.packed == 2
    found = nf4conv.verify(tmp_path / "out", source=source, exact=True, **CPU)
    assert found.passed, [finding.line() for finding in found.findings]
    assert found.identical


def test_ours_is_written_again_as_it_is(source, tmp_path):
    nf4conv.quantize(source, tmp_path / "nf4", **CPU)
    nf4conv.quantize(tmp_path / "nf4", tmp_path / "again", **CPU)
    assert_same_tensors(tmp_path / "again", tmp_path / "nf4")
    assert (tmp_path / "again/config.json").read_bytes() == (
        tmp_path / "nf4/config.json"
    ).read_bytes()


def test_only_weights_in_another_format_are_packed_anew_and_the_plan_says_which(tmp_path):
    [first, _], [_, second] = weights(blocksize=64), weights(blocksize=128)
    source = write(tmp_path / "source", first | second | kept())
    plan = nf4conv.plan_quantize(source, blocksize=128).made
    rows = {row.name: row for row in plan.rows()}
    assert (rows[NAMES[0]].action, rows[NAMES[1]].action) == ("pack", "stay")
    assert rows[NAMES[0]].reason == "nn.Linear, packed anew: stored as nf4+/64"
    assert any(
        f"1 weights are packed anew, such as {NAMES[0]}: stored as nf4+/64" in note
        for note in plan.notes
    )
    nf4conv.quantize(source, tmp_path / "out", blocksize=128, **CPU)
    after = tensors_of(tmp_path / "out")
    assert all(raw(after[name]) == raw(tensor) for name, tensor in second.items())
    nf4conv.dequantize(source, tmp_path / "plain", **CPU)
    nf4conv.quantize(tmp_path / "plain", tmp_path / "expected", blocksize=128, **CPU)
    expected = tensors_of(tmp_path / "expected")
    assert all(
        raw(after[name]) == raw(expected[name]) for name in after if name.startswith(NAMES[0])
    )


def test_another_dtype_is_packed_anew(tmp_path):
    source = write(tmp_path / "source", *weights(), kept())
    plan = nf4conv.plan_quantize(source, dtype="float16").made
    assert {row.action for row in plan.rows() if row.name in NAMES} == {"pack"}
    nf4conv.quantize(source, tmp_path / "out", dtype="float16", **CPU)
    assert nf4conv.verify(tmp_path / "out", **CPU).passed


def test_what_the_source_computes_in_stays(tmp_path):
    source = write(
        tmp_path / "source", *weights(), kept(), quantization={"bnb_4bit_compute_dtype": "float16"}
    )
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["bnb_4bit_compute_dtype"] == "float16"


def test_what_other_tools_packed_stays_packed(tmp_path):
    """Towers, experts, and what the rules are not sure of: it is certainly linear, and loads as it
    did.
    """
    names = [
        "model.layers.0.mlp.experts.0.up_proj",
        "visual.blocks.0.mlp.fc1",
        "model.strange_projection",
    ]
    packed = {
        key: part
        for name in names
        for key, part in pack(f"{name}.weight", torch.randn(64, 64).bfloat16()).items()
    }
    source = write(tmp_path / "source", packed | kept())
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "qwen2_vl", "vision_config": {}, "vocab_size": 256}
    (source / "config.json").write_text(json.dumps(config))
    actions = {row.name: row.action for row in nf4conv.plan_quantize(source).made.rows()}
    assert {actions[f"{name}.weight"] for name in names} == {"stay"}
    portable = {
        row.name: row.action for row in nf4conv.plan_quantize(source, moe="portable").made.rows()
    }
    assert portable[f"{names[0]}.weight"] != "stay"
    excluded = nf4conv.plan_quantize(source, exclude=("visual.*",)).made
    assert {row.name: row.reason for row in excluded.rows()}[
        f"{names[1]}.weight"
    ] == "excluded by the user"


def spread(parts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """transformers' own saves: 4.54 … 4.56 fail to load them."""
    return [{name: part for name, part in parts.items() if "absmax" in name}, {
        name: part for name, part in parts.items() if "absmax" not in name
    }]  # fmt: skip


def without_map(parts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: part for name, part in parts.items() if not name.endswith(".quant_map")}]


def low_map(parts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Makes the code map as bitsandbytes before 0.45.3 did under another default dtype."""
    return [
        {
            name: part.bfloat16().float() if name.endswith(".quant_map") else part
            for name, part in parts.items()
        }
    ]


def flat(parts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{name: part.view(1, -1) if name in NAMES else part for name, part in parts.items()}]


def flat_map(parts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [
        {
            name: part.view(1, -1) if name.endswith(".quant_map") else part
            for name, part in parts.items()
        }
    ]


def edited(parts: dict[str, torch.Tensor], **fields: Any) -> list[dict[str, torch.Tensor]]:
    def edit(blob: torch.Tensor) -> torch.Tensor:
        content = json.dumps(json.loads(bytes(blob.tolist())) | fields).encode()
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    return [{name: edit(part) if "quant_state" in name else part for name, part in parts.items()}]


def low_nested_dtype(parts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Names the dtype that bitsandbytes saves on a CPU after a forward pass."""
    return edited(parts, nested_dtype="bfloat16")


def more_keys(parts: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return edited(parts, made_by="something")


BAD = {
    "spread over shards": (spread, {}, "is apart from its weight"),
    "no code map": (without_map, {}, "quant_map is missing"),
    "code map in low precision": (low_map, {}, "nf4 in low precision"),
    "code map in one row": (flat_map, {}, r"F32 \[1, 16\], expected F32 \[16\]"),
    "codes in one row": (flat, {}, r"packed as \[1, 6144\], not as \[n, 1\]"),
    "nested dtype": (low_nested_dtype, {}, "nested_dtype is 'bfloat16'"),
    "a key too many": (more_keys, {}, "has the key 'made_by'"),
    "skip list": (
        lambda parts: [parts],
        {"llm_int8_skip_modules": ["model.layers.0"]},
        "would skip it",
    ),
    "skip list of null": (lambda parts: [parts], {"llm_int8_skip_modules": None}, "is null"),
    "data type in the config": (
        lambda parts: [parts],
        {"bnb_4bit_quant_type": "fp4"},
        "bnb_4bit_quant_type is 'fp4'",
    ),
    "threshold": (lambda parts: [parts], {"llm_int8_threshold": 6}, "takes only a float"),
}


@pytest.mark.parametrize("verify", [False, True], ids=["written", "written and verified"])
@pytest.mark.parametrize("what", BAD)
def test_a_bad_save_is_named_by_inspect_and_repaired_without_a_bit_of_codes_and_scales(
    tmp_path, what, verify
):
    damage, quantization, message = BAD[what]
    good = {name: part for parts in weights() for name, part in parts.items()}
    shards = damage(good)
    source = write(
        tmp_path / "source", *shards[:-1], shards[-1] | kept(), quantization=quantization
    )
    found = nf4conv.inspect(source)
    assert any(re.search(message, finding.line()) for finding in found.findings), found.findings
    shown = CliRunner().invoke(main, ["inspect", str(source)])
    repairable = any(finding.is_fault for finding in found.findings)
    assert (f"nf4conv quantize {source} OUT" in shown.output) is repairable
    run = {"device": "cpu", "workers": 2, "buffer_size": 2 * 65536, "verify": verify}
    report = nf4conv.quantize(source, tmp_path / "out", **run)
    assert any("of 2 weights in 4 bits 2 stay" in note for note in report.notes)
    after = tensors_of(tmp_path / "out")
    assert {name: raw(part) for name, part in after.items() if name not in kept()} == {
        name: raw(part) for name, part in good.items()
    }
    assert not [
        finding for finding in nf4conv.inspect(tmp_path / "out").findings if finding.is_fault
    ]
    assert nf4conv.verify(tmp_path / "out", **CPU).passed


def test_what_is_damaged_beyond_repair_is_packed_anew_or_refused(tmp_path):
    [first, second] = weights()
    fp4 = torch.tensor(struct.unpack("<16f", struct.pack("<16f", *CODEBOOKS["fp4"].values)))
    wrong = write(tmp_path / "wrong", first | {f"{NAMES[0]}.quant_map": fp4} | second | kept())
    reasons = {row.name: row.reason for row in nf4conv.plan_quantize(wrong).made.rows()}
    assert "packed anew: code maps: the values are those of fp4, not nf4" in reasons[NAMES[0]]
    assert reasons[NAMES[1]] == "stays as it is"
    absmax = f"{NAMES[0]}.absmax"
    lost = write(
        tmp_path / "lost", {k: v for k, v in first.items() if k != absmax} | second | kept()
    )
    with pytest.raises(SourceError, match=rf"{NAMES[0]}: absmax is missing"):
        nf4conv.plan_quantize(lost)
    low = write(
        tmp_path / "low", first | {absmax: first[absmax].bfloat16().view(2, -1)} | second | kept()
    )
    with pytest.raises(SourceError, match=r"absmax: bfloat16 and transposed .* Expected U8"):
        nf4conv.plan_quantize(low)


@pytest.mark.parametrize("suffix", COMPONENT_SUFFIXES)
def test_a_component_whose_weight_is_missing_is_refused(tmp_path, suffix):
    """Kept as a tensor of its own it would stand in a result that verify finds fault with."""
    kept = pack("model.layers.0.mlp.up_proj.weight", torch.randn(64, 64).bfloat16())
    gone = pack("model.layers.1.mlp.up_proj.weight", torch.randn(64, 64).bfloat16())
    stray = {name: part for name, part in gone.items() if name.endswith(suffix)}
    stray = stray or {
        f"model.layers.1.mlp.up_proj.weight.{suffix}": torch.zeros(8, dtype=torch.uint8)
    }
    source = write(tmp_path / "source", kept | stray)
    with pytest.raises(
        SourceError, match=r"layers.1.mlp.up_proj.*: part of a weight that is already quantized"
    ):
        nf4conv.plan_quantize(source)


def test_inspect_has_nothing_against_a_good_checkpoint(tmp_path):
    nf4conv.quantize(write_source(tmp_path / "source"), tmp_path / "out", **CPU)
    assert nf4conv.inspect(tmp_path / "out").findings == ()
    assert nf4conv.inspect(tmp_path / "source").findings == ()


# packed bytes as another dtype, for FSDP


@pytest.mark.parametrize("storage", STORAGES)
def test_the_same_bytes_are_stored_as_another_dtype(source, tmp_path, storage):
    options = {"quant_storage": storage}
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    nf4conv.quantize(source, plain, **CPU)
    nf4conv.quantize(source, stored, **options, device="cpu", verify=True)
    before, after = tensors_of(plain), tensors_of(stored)
    assert {name: raw(part) for name, part in after.items()} == {
        name: raw(part) for name, part in before.items()
    }
    for name, part in before.items():
        is_packed = f"{name}.absmax" in before
        assert after[name].dtype == (STORAGES[storage] if is_packed else part.dtype)
        assert after[name].shape == (
            (part.numel() // STORAGES[storage].itemsize, 1) if is_packed else part.shape
        )
    config = json.loads((stored / "config.json").read_text())["quantization_config"]
    assert config["bnb_4bit_quant_storage"] == storage
    report = nf4conv.verify(stored, source=source, exact=True, **CPU)
    assert report.passed, [finding.line() for finding in report.findings]
    assert {row.format.quant_storage for row in nf4conv.inspect(stored).tensors if row.format} == {
        storage
    }
    assert compared(plain, stored).within(0)
    for folder in (plain, stored):
        nf4conv.dequantize(folder, folder.with_name(f"{folder.name}-again"), **CPU)
    assert_same_tensors(tmp_path / "stored-again", tmp_path / "plain-again")


def test_the_storage_of_a_source_stays_unless_another_is_asked_for(source, tmp_path):
    nf4conv.quantize(source, tmp_path / "nf4", **CPU)
    nf4conv.quantize(tmp_path / "nf4", tmp_path / "fsdp", quant_storage="bfloat16", **CPU)
    nf4conv.quantize(tmp_path / "fsdp", tmp_path / "same", **CPU)
    nf4conv.quantize(tmp_path / "fsdp", tmp_path / "back", quant_storage="uint8", **CPU)
    for name, other in (("same", "fsdp"), ("back", "nf4")):
        assert_same_tensors(tmp_path / name, tmp_path / other)
        assert (tmp_path / name / "config.json").read_bytes() == (
            tmp_path / other / "config.json"
        ).read_bytes()


def test_a_weight_whose_bytes_do_not_divide_has_to_be_excluded(tmp_path):
    folder = tmp_path / "source"
    odd, even = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    save_model(
        folder,
        {odd: torch.ones(33, 2).bfloat16(), even: torch.ones(64, 64).bfloat16()},
        {"model_type": "llama", "dtype": "bfloat16"},
    )
    with pytest.raises(PlanError, match=f"{odd}: its packed bytes do not divide"):
        nf4conv.plan_quantize(folder, quant_storage="float32")
    plan = nf4conv.plan_quantize(folder, quant_storage="float32", exclude=[odd])
    assert [row.action for row in plan.rows] == ["pack", "copy"]


@pytest.mark.oracle
@pytest.mark.parametrize("storage", ["bfloat16", "float16"])
def test_transformers_stores_the_same_and_loads_it(tmp_path, storage):
    """From the 4-bit weights that transformers makes: whose codes its CPU library rounds otherwise
    does not matter.
    """
    base = make_model(tmp_path / "base", "llama", torch.bfloat16)

    def saved(name: str) -> Path:
        asked = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_quant_storage=getattr(torch, name),
        )
        model = load(base, quantization_config=asked, device_map="cpu", dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    plain, theirs = saved("uint8"), saved(storage)
    nf4conv.quantize(plain, tmp_path / "ours", quant_storage=storage, **CPU)
    assert_same_tensors(tmp_path / "ours", theirs)
    mine, its = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "ours", theirs)
    )
    # the first it leaves to every loader's guess, the others no loader reads
    differing = {"llm_int8_skip_modules", "_load_in_4bit", "_load_in_8bit"}
    for key in its["quantization_config"].keys() - differing:
        assert mine["quantization_config"][key] == its["quantization_config"][key], key
    text = torch.arange(12)[None]
    with torch.no_grad():
        outputs = [
            load(folder, device_map="cpu")(text).logits
            for folder in (tmp_path / "ours", theirs, plain)
        ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
