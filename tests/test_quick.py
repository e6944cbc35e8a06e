"""The quick test: every command once, on a checkpoint of a few kilobytes (`make test-quick`).

It is enough while you work: after a rename, a move or a change of wording, before the tests of the
part that you change. It is not enough before a change lands: it reads one file of safetensors and
knows one kind of model. `make test` has the rest.

The weights are those of tests/golden, so what the commands write is held against bytes that
bitsandbytes made on a GPU.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import host_driver
import pytest
import torch
from checkpoints import contents, pushed, save_model
from click.testing import CliRunner, Result
from gguf_files import write_gguf
from hub_server import Hub, Repo
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.cli import main

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # 1 / 0 is meant in kernels

GOLDEN = Path(__file__).parent / "golden"

# the recorded cases with nested scales, named blocksize-elements, and the shapes that they get here
SHAPES = {
    "32-295": (59, 5),
    "64-801": (89, 9),
    "128-384": (96, 4),
    "1024-1535": (307, 5),
    "4096-5096": (56, 91),
}


def weight_name(case: str) -> str:
    """Returns the name in the checkpoint of the weight that a case was recorded for."""
    layer = list(SHAPES).index(case)
    return f"model.layers.{layer}.mlp.up_proj.weight"


def write_source(folder: Path, dtype: str) -> Path:
    """Writes a checkpoint of the recorded weights, "bf16" or "f16"."""
    vectors = load_file(GOLDEN / f"{dtype}.safetensors")
    tensors = {"model.norm.weight": torch.ones(64, dtype=vectors["64-801/weight"].dtype)}
    for case, shape in SHAPES.items():
        tensors[weight_name(case)] = vectors[f"{case}/weight"].view(shape)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 256,
        "dtype": {"bf16": "bfloat16", "f16": "float16"}[dtype],
    }
    return save_model(folder, tensors, config)


def run(*arguments: object, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result


def run_json(*arguments: object, exit_code: int = 0) -> dict:
    return json.loads(run(*arguments, "--json", exit_code=exit_code).stdout)


def assert_recorded(folder: Path, dtype: str, case: str, quant_type: str) -> None:
    """Holds one packed weight of a checkpoint against the bytes of bitsandbytes."""
    vectors = load_file(GOLDEN / f"{dtype}.safetensors")
    written = load_file(folder / "model.safetensors")
    name = weight_name(case)
    for suffix, component in {
        "": "packed",
        ".absmax": "codes",
        ".nested_absmax": "nested_absmax",
    }.items():
        expected = vectors[f"{case}/{quant_type}/{component}"]
        assert torch.equal(written[name + suffix].view(-1), expected.view(-1)), name + suffix


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("quick") / "source", "bf16")


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    """The checkpoint that most tests read."""
    out = source.with_name("packed")
    run("quantize", source, out, "--device", "cpu")
    return out


def test_inspect(source: Path, packed: Path):
    before = run_json("inspect", source)["totals"]
    after = run_json("inspect", packed)["totals"]
    assert (before["packed"], after["packed"]) == (0, 5)
    assert before["bytes"] == 2 * sum(rows * columns for rows, columns in SHAPES.values()) + 128
    assert "mlp.up_proj" in run("inspect", packed).stdout


@pytest.mark.parametrize(("blocksize", "quant_type"), [(64, "nf4"), (1024, "fp4")])
def test_quantize(source: Path, tmp_path: Path, blocksize: int, quant_type: str):
    report = run_json(
        *("quantize", source, tmp_path / "out", "--device", "cpu"),
        *("--blocksize", blocksize, "--quant-type", quant_type),
    )
    assert report["totals"]["packed"] == 5
    case = next(case for case in SHAPES if case.startswith(f"{blocksize}-"))
    assert_recorded(tmp_path / "out", "bf16", case, quant_type)


def test_non_finite(source: Path, tmp_path: Path):
    shutil.copytree(source, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights[weight_name("64-801")][3, 4] = float("nan")
    save_file(weights, tmp_path / "source/model.safetensors")
    asked = ("quantize", tmp_path / "source", tmp_path / "out", "--device", "cpu")
    refused = run(*asked, exit_code=2)
    assert f"{weight_name('64-801')}: has values that are NaN or infinite" in refused.stderr
    excluded = ("--exclude", weight_name("64-801"), "--overwrite")
    assert run_json(*asked, *excluded)["totals"]["packed"] == 4
    kept = load_file(tmp_path / "out/model.safetensors")[weight_name("64-801")]
    expected = weights[weight_name("64-801")]
    assert torch.equal(kept.view(torch.uint8), expected.view(torch.uint8))


def test_dry_run(source: Path, tmp_path: Path):
    plan = run_json("quantize", source, tmp_path / "out", "--dry-run")
    assert [row["action"] for row in plan["tensors"]].count("pack") == 5
    assert not (tmp_path / "out").exists()


def test_verify(source: Path, packed: Path, tmp_path: Path):
    # every 97th value is an outlier, so the error is larger than that of a real weight
    page = tmp_path / "page.html"
    asked = ("--exact", "--tolerance", 0.3, "--device", "cpu", "--report", page)
    assert run_json("verify", packed, "--source", source, *asked)["passed"]
    assert page.read_text().startswith("<!doctype html>")
    damaged = tmp_path / "damaged"
    shutil.copytree(packed, damaged)
    with (damaged / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7e")
    asked = ("--source", source, "--tolerance", 0.3, "--device", "cpu")
    assert not run_json("verify", damaged, *asked, exit_code=1)["passed"]


def test_quantize_and_verify(source: Path, packed: Path, tmp_path: Path):
    out = tmp_path / "out"
    run("quantize", source, out, "--device", "cpu", "--verify", "--tolerance", 0.3)
    written = (out / "model.safetensors").read_bytes()
    assert written == (packed / "model.safetensors").read_bytes()


def test_options_as_keywords(source: Path, packed: Path):
    assert nf4conv.inspect(packed).totals.packed
    assert nf4conv.verify(packed, source=source, tolerance=0.3, device="cpu").passed


def test_two_processes(source: Path, tmp_path: Path):
    run("quantize", source, tmp_path / "single", "--device", "cpu", "--max-shard-size", "1KB")
    run("quantize", source, tmp_path / "spread", "--device", "cpu,cpu", "--max-shard-size", "1KB")
    assert contents(tmp_path / "spread") == contents(tmp_path / "single")


def test_diffusers_pipeline(source: Path, packed: Path, tmp_path: Path):
    shutil.copytree(source, tmp_path / "pipeline" / "text_encoder")
    index = {
        "_class_name": "StableDiffusionPipeline",
        "text_encoder": ["transformers", "LlamaModel"],
    }
    (tmp_path / "pipeline" / "model_index.json").write_text(json.dumps(index))
    run("quantize", tmp_path / "pipeline", tmp_path / "out", "--device", "cpu")
    written = (tmp_path / "out" / "text_encoder" / "model.safetensors").read_bytes()
    assert written == (packed / "model.safetensors").read_bytes()


def test_two_that_do_not_say_how_they_are_related(source: Path, tmp_path: Path):
    copy = shutil.copytree(source, tmp_path / "copy")
    run("verify", copy, "--source", source, "--device", "cpu", exit_code=2)
    run("verify", copy, "--source", source, "--exact", "--device", "cpu")


def test_dequantize(packed: Path, tmp_path: Path):
    run("dequantize", packed, tmp_path / "out", "--device", "cpu")
    decoded = load_file(tmp_path / "out/model.safetensors")[weight_name("64-801")]
    expected = load_file(GOLDEN / "bf16.safetensors")["64-801/nf4/dequantized"]
    assert torch.equal(decoded.view(-1), expected)


def test_parts(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    sizes = ("--max-shard-size", "2KB", "--device", "cpu")
    run("quantize", source, tmp_path / "single", *sizes)
    run("quantize", source, out, *sizes, "--part", "2/2")
    assert not (out / "config.json").exists()
    run("quantize", source, out, *sizes, "--part", "1/2")
    assert contents(out) == contents(tmp_path / "single")


def test_hub(source: Path, packed: Path, tmp_path: Path, hub: Hub):
    """Reads from the Hub, with the files kept and without, and pushes to it."""
    hub.repos["org/source"] = Repo()
    hub.repos["org/source"].commit(contents(source))
    run("quantize", "org/source", tmp_path / "kept", "--device", "cpu", "--cache-dir", tmp_path)
    run(
        *("quantize", "org/source", tmp_path / "out", "--device", "cpu", "--stream"),
        *("--push-to-hub", "me/out", "--token", "hf_writer"),
    )
    assert load_file(tmp_path / "out/model.safetensors").keys() == (
        load_file(packed / "model.safetensors").keys()
    )
    files = hub.repos["me/out"].files
    assert pushed(tmp_path / "out", "me/out").items() <= files.items()
    shard = (packed / "model.safetensors").read_bytes()
    assert (tmp_path / "kept/model.safetensors").read_bytes() == shard
    assert (tmp_path / "out/model.safetensors").read_bytes() == shard


def test_a_gguf_file_on_the_hub(tmp_path: Path, hub: Hub):
    """Reads its header by ranges, and keeps nothing of it."""
    content = write_gguf(tmp_path / "model.gguf").read_bytes()
    hub.repos["me/models"] = Repo()
    hub.repos["me/models"].commit({"model.gguf": content})
    words = ("me/models", "--gguf-file", "model.gguf", "--cache-dir", tmp_path / "hub")
    assert "self_attn.q_proj" in run("inspect", *words, "--json").stdout
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def test_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine without torch and its kernels, on a GPU that host_driver plays."""
    if not torch.cuda.is_available():
        host_driver.install(monkeypatch)
    source = write_source(tmp_path / "source", "f16")
    run("quantize", source, tmp_path / "out", "--device", "cuda")
    assert_recorded(tmp_path / "out", "f16", "64-801", "nf4")
    asked = ("--exact", "--tolerance", 0.3, "--device", "cuda")
    run("verify", tmp_path / "out", "--source", source, *asked)
    run("dequantize", tmp_path / "out", tmp_path / "again", "--device", "cuda")
    decoded = load_file(tmp_path / "again/model.safetensors")[weight_name("64-801")]
    expected = load_file(GOLDEN / "f16.safetensors")["64-801/nf4/dequantized"]
    assert torch.equal(decoded.view(-1), expected)
    run("verify", tmp_path / "again", "--source", tmp_path / "out", "--device", "cuda")


def test_linear():
    packed, state = nf4conv.quantize_4bit(torch.eye(64) * 2)
    out = nf4conv.linear_4bit(torch.ones(1, 64), packed, state)
    assert torch.equal(out, torch.full((1, 64), 2.0))


def test_the_fused_product():
    """Only a GPU runs its kernels; here they are imported."""
    from nf4conv.inference.kernels.product import choosing, launches

    form = choosing.Form("nf4", 64, True)
    assert choosing.has_kernel(choosing.Matrix(64, 64, form, 16), torch.bfloat16)
    assert not choosing.has_kernel(choosing.Matrix(64, 33, form, 16), torch.float16)
    rows = [shape.rows for shape in launches.SHAPES]
    assert rows == sorted(rows)
    assert rows[-1] == 64


def test_evaluate(tmp_path: Path):
    """A model of transformers, asked about 64 tokens."""
    transformers = pytest.importorskip("transformers")
    import numpy as np

    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    np.save(tmp_path / "ids.npy", np.arange(64, dtype=np.int32) * 37 % 300)
    run(
        *("quantize", tmp_path / "source", tmp_path / "out", "--device", "cpu"),
    )
    run("dequantize", tmp_path / "out", tmp_path / "decoded", "--device", "cpu")
    report = run_json(
        *("evaluate", tmp_path / "out", "--source", tmp_path / "decoded"),
        *("--text", tmp_path / "ids.npy", "--device", "cpu"),
    )
    figures = report["evaluations"][0]["figures"]
    assert figures["agreement"] == 1
    assert abs(figures["kl"]) < 1e-6


def test_evaluate_says_what_it_needs(packed: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused = run("evaluate", packed, "--source", packed, exit_code=2)
    assert "nf4conv[evaluate]" in refused.stderr


def test_env():
    assert run_json("env")["nf4conv"] == nf4conv.__version__


def test_python_m(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Calls the program's entrance, which ends its process with os._exit."""
    from nf4conv.__main__ import run as enter

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("gc.set_threshold", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["nf4conv", "--version"])
    with pytest.raises(SystemExit) as left:
        enter()
    assert left.value.code == 0
    assert capfd.readouterr().out.strip() == f"nf4conv {nf4conv.__version__}"
