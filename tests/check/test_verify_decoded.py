"""`verify` of what `dequantize` made: what is right passes, and every kind of damage is named."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import integers
import pytest
import torch
from checkpoints import write_source
from comparing import compared
from gguf_files import write_gguf
from safetensors.torch import load_file
from test_integer_sources import GPTQ, OTHERS, write_tensors
from test_integer_sources import write as write_integers
from test_lora import write_adapter
from test_verify import (
    Damages,
    add,
    add_stray,
    assert_found,
    change,
    config,
    delete,
    drop,
    failing,
    filled,
    flipped,
    header,
    index,
    raw,
    record,
    rename,
    run_command,
    shards,
    swap,
    write_text,
)

import nf4conv
from nf4conv.errors import Nf4convError
from nf4conv.options import Dtype
from nf4conv.plan.rows import Errors
from nf4conv.report.results import VerifyReport

CPU = {"device": "cpu", "workers": 2}
SMALL = {"device": "cpu", "workers": 2, "buffer_size": 1}
EXACT = {"exact": True}

Q = "model.layers.0.self_attn.q_proj.weight"
O = "model.layers.0.self_attn.o_proj.weight"  # noqa: E741
NORM = "model.norm.weight"


def write_one(folder: Path, kind: str) -> Path:
    """A source of a kind."""
    if kind == "gguf":
        types = {"blk.0.attn_q.weight": "Q4_K", "blk.0.attn_k.weight": "F16"}
        return write_gguf(folder.with_suffix(".gguf"), types=types, default="Q8_0")
    if kind == "bitsandbytes":
        plain = write_source(folder.with_name("in-16-bits"), layers=2)
        nf4conv.quantize(plain, folder, **CPU)
        return folder
    if kind == "gptq, reordered":
        return write_integers(folder, partial(integers.gptq, is_reordered=True), GPTQ)[0]
    return write_integers(folder, *OTHERS[kind])[0]


KINDS = ("gguf", "bitsandbytes", "gptq, reordered", *OTHERS)


def unlike(report: VerifyReport) -> list[Errors]:
    """The errors of the tensors that differ."""
    return [row.errors for row in report.tensors if row.errors and row.errors.differing]


def assert_right(report: VerifyReport) -> None:
    """Asserts that every tensor was compared, and all are equal."""
    assert report.passed, report.findings
    assert report.relation == "decoded"
    assert report.identical
    assert sum(row.parameters for row in report.tensors) == report.parameters > 0
    assert unlike(report) == []
    assert "bit for bit what decoding the source gives" in report.verdict


@pytest.mark.parametrize("kind", KINDS)
def test_what_dequantize_makes_is_right(tmp_path: Path, kind: str):
    """Of each kind, in one file and in several, alone and against the source; then one bit less."""
    source = write_one(tmp_path / "source", kind)
    out = tmp_path / "out"
    options = {"max_shard_size": 150_000}
    nf4conv.dequantize(source, out, **options, **CPU)
    for run in (CPU, SMALL):
        assert_right(nf4conv.verify(out, source=source, **EXACT, **run))
    alone = nf4conv.verify(out, **CPU)
    assert alone.passed
    assert alone.tensors == ()
    assert {"config", "record"} <= alone.checks.keys()
    assert not {"copies", "codes", "tolerance"} & alone.checks.keys()
    assert any("give --source to decode" in finding.text for finding in alone.findings)
    change(Q, flipped(-1, 0))(out)
    [fault] = [
        found for found in nf4conv.verify(out, source=source, **SMALL).findings if found.tensor
    ]
    assert (fault.check, fault.tensor, fault.is_fault) == ("copies", Q, True)
    assert fault.text.startswith("1 of ")


@pytest.mark.parametrize(
    ("kind", "dtype"), [("gguf", "float16"), ("gguf", "float32"), ("gptq", "bfloat16")]
)
def test_the_dtype_that_was_asked_for(tmp_path: Path, kind: str, dtype: Dtype):
    source = write_one(tmp_path / "source", kind)
    out = tmp_path / "out"
    nf4conv.dequantize(source, out, dtype=dtype, **CPU)
    assert_right(nf4conv.verify(out, source=source, **EXACT, **CPU))
    delete("nf4conv.json")(out)  # as another tool leaves it: nothing says what it is
    # what stays of GPTQ in float16 is rounded in bfloat16
    rounded = kind == "gptq" and dtype == "bfloat16"
    options = {"tolerance": 0.004} if rounded else EXACT
    report = nf4conv.verify(out, source=source, **options, **CPU)
    assert report.passed
    assert report.relation == "none"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_one(tmp_path_factory.mktemp("decoded") / "source", "gguf")


@pytest.fixture(scope="module")
def good(source: Path) -> Path:
    """Several shards, from GGUF."""
    out = source.parent / "good"
    nf4conv.dequantize(source, out, max_shard_size=400_000, **CPU)
    assert len(shards(out)) > 1
    return out


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "damaged"))


def drop_everywhere(name: str) -> Callable[[Path], None]:
    """A tensor, from its file and from the index."""

    def damage(folder: Path) -> None:
        drop(name)(folder)
        index(lambda table: table["weight_map"].pop(name))(folder)

    return damage


FIRST = "model-00001-of-00004.safetensors"
QUANTIZATION = {"quant_method": "gptq", "bits": 4}
ALONE: Damages = {
    **failing("config", "config.json", {
        "quantization left": config(quantization_config=QUANTIZATION),
        "quantization left inside": config(text_config={"quantization_config": QUANTIZATION}),
        "config is no JSON": write_text("config.json", "{"),
    }),
    **failing("config", "quantize_config.json", {
        "file of a quantization left": write_text("quantize_config.json", "{}"),
    }),
    **failing("files", FIRST, {
        "a shard lost": delete(FIRST),
        "a shard cut off": raw(lambda content: content[:-1]),
        "header is no JSON": raw(lambda content: content[:8] + b"x" + content[9:]),
    }),
    "a stray file": (add_stray, "files", "adapter_model.safetensors"),
    **failing("index", NORM, {
        "not in the index": index(lambda table: table["weight_map"].pop(NORM)),
        "lost, but in the index": drop(NORM),
    }),
    **failing("record", "nf4conv.json", {
        "recorded otherwise": record(not_packed={"bfloat16": 3}),
        "recorded as packed": record(weights=[{"quant_type": "nf4", "count": 1}]),
    }),
}  # fmt: skip
AGAINST_THE_SOURCE: Damages = {
    **ALONE,
    **failing("copies", Q, {
        "first bit": change(Q, flipped(0, 0)),
        "last bit": change(Q, flipped(-1, 7)),
        "NaN": change(Q, filled(70, float("nan"))),
        "swapped": swap(Q, O),
        "in another order": change(Q, lambda tensor: tensor.flip(0)),
        "transposed": change(Q, lambda tensor: tensor.t()),
        "another shape": change(Q, lambda tensor: tensor.reshape(128, 512)),
        "another dtype": change(Q, lambda tensor: tensor.half()),
        "wider": change(Q, lambda tensor: tensor.float()),
        "recorded dtype": record(lambda content: content["options"].update(dtype="float16")),
    }),
    "a bit of a vector": (change(NORM, flipped(5, 0)), "copies", NORM),
    "swapped, the other": (swap(Q, O), "copies", O),
    "missing": (drop_everywhere(Q), "names", Q),
    "a tensor too many": (add("model.layers.0.bias"), "names", "model.layers.0.bias"),
    "renamed": (rename(NORM, "model.norm.scale"), "names", "model.norm.scale"),
    "what it was decoded from is left": (add(f"{Q}.absmax"), "names", f"{Q}.absmax"),
    **failing("model config", "config.json", {
        "a shape in config.json": config(num_attention_heads=8),
        "dtype in config.json": config(dtype="float16"),
        "config lost": delete("config.json"),
    }),
    "dtype in the header": (header(b'"BF16"', b'"F16" '), "copies", ""),
    **failing("record", "nf4conv.json", {
        "recorded dtype unknown": record(lambda content: content["options"].update(dtype="int3")),
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", ALONE)
def test_damage_that_shows_without_the_source(damaged: Path, kind: str):
    damage, check, name = ALONE[kind]
    damage(damaged)
    code, found, output = run_command(damaged)
    assert code == 1, output
    assert_found(found, check, name)
    assert output.rstrip().splitlines()[-1].startswith("FAILED")


@pytest.mark.parametrize("kind", AGAINST_THE_SOURCE)
def test_damage_that_shows_against_the_source(damaged: Path, source: Path, kind: str):
    damage, check, name = AGAINST_THE_SOURCE[kind]
    damage(damaged)
    code, found, output = run_command(damaged, "--source", str(source))
    assert code == 1, output
    if name:
        assert_found(found, check, name)
    for finding in found:
        assert finding["file"] or finding["tensor"], finding
    assert output.rstrip().splitlines()[-1].startswith("FAILED")


def test_keys_and_files_beside_the_weights_count_with_exact(damaged: Path, source: Path):
    config(use_cache=False)(damaged)
    assert nf4conv.verify(damaged, source=source, **CPU).passed
    assert not nf4conv.verify(damaged, source=source, **EXACT, **CPU).passed


def test_no_tolerance_lets_a_bit_pass(damaged: Path, source: Path):
    change(Q, flipped(0, 0))(damaged)
    report = nf4conv.verify(damaged, source=source, tolerance=1.0, **CPU)
    assert not report.passed
    assert not report.identical
    [errors] = unlike(report)
    assert errors.differing == 1
    assert 0 < errors.largest < 1
    assert "1 of 12 tensors differ" in report.verdict
    assert "largest difference" in report.verdict


# --- adapters -------------------------------------------------------------------------------------


def lora(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    module = Q.removesuffix(".weight")
    tensors = {
        f"{module}.lora_A.weight": torch.randn(4, 128),
        f"{module}.lora_B.weight": torch.randn(128, 4),
    }
    return write_adapter(folder, tensors, target_modules=["q_proj"])


def test_merged_adapters_are_merged_again(tmp_path: Path):
    source = write_one(tmp_path / "source", "gptq")
    right, wrong = lora(tmp_path / "right", 1), lora(tmp_path / "wrong", 2)
    out = tmp_path / "out"
    nf4conv.dequantize(source, out, lora=(str(right),), **CPU)
    options = {"exact": True, "lora": (str(right),)}
    assert_right(nf4conv.verify(out, source=source, **options, **CPU))
    other = nf4conv.verify(out, source=source, lora=(str(wrong),), **CPU)
    assert [finding.tensor for finding in other.findings if finding.is_fault] == [Q]
    code, _, output = run_command(out, "--source", str(source))
    assert code == 2
    assert "adapters were merged into it (right)" in output
    assert "--lora" in output
    assert nf4conv.verify(out, **CPU).passed


# --- bad input ------------------------------------------------------------------------------------


ODD_RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "dtype is long": lambda content: content["options"].update(dtype="x" * 10**6),
    "no options": lambda content: content.update(options={}),
    "adapters are numbers": lambda content: content["source"].update(adapters=[1]),
    "weights of nothing": lambda content: content.update(weights=[None, 1, {"names": 1}]),
    "of no source": lambda content: content.update(source={}),
}


@pytest.mark.parametrize("kind", ODD_RECORDS)
def test_odd_records(damaged: Path, source: Path, kind: str):
    """Each is a fault, or refused in a line; or it says nothing that is wrong."""
    record(ODD_RECORDS[kind])(damaged)
    for options in ((), ("--source", str(source))):
        code, found, output = run_command(damaged, *options)
        assert code in (0, 1, 2)
        assert code != 1 or any(finding["is_fault"] for finding in found)
        assert len(output) < 4000, output[:1000]
    if kind in ("no options", "of no source"):
        assert code == 0, output
    else:
        assert code != 0


def test_sources_that_cannot_be_read(good: Path, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((good.parent / "source.gguf").read_bytes()[:-1])
    (tmp_path / "text.gguf").write_text("text")
    for name in ("cut.gguf", "text.gguf", "nothing"):
        with pytest.raises(Nf4convError):
            nf4conv.verify(good, source=tmp_path / name, **CPU)


# --- experts -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_stacks_that_were_made_of_single_experts(tmp_path: Path, dtype: Dtype | None):
    """Each expert is decoded to the dtype of its part of the stack, not to its own first."""
    tensors: dict[str, Any] = {"model.embed_tokens.weight": torch.ones(96, 64).half()}
    for expert in range(2):
        for name, shape in {"gate": (32, 64), "up": (32, 64), "down": (64, 32)}.items():
            weight = f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"
            tensors[weight] = integers.gptq(*shape)
    described = {"model_type": "qwen3_vl_moe_text", "num_experts": 2, "dtype": "float16"}
    source, _ = write_tensors(tmp_path / "source", tensors, described, GPTQ)
    out = tmp_path / "out"
    nf4conv.dequantize(source, out, dtype=dtype, **CPU)
    assert "model.layers.0.mlp.experts.down_proj" in load_file(shards(out)[0])
    assert_right(nf4conv.verify(out, source=source, **EXACT, **CPU))
    for sides in ((source, out), (out, source)):
        assert compared(*sides, **CPU).within(0)
    change("model.layers.0.mlp.experts.down_proj", flipped(-1, 0))(out)
    assert not nf4conv.verify(out, source=source, **CPU).passed
    assert not compared(source, out, **CPU).within(0)
