"""`verify --source` between layouts of experts; parts, streams and small buffers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from api import dequantize_checkpoint, quantize_checkpoint, verify_checkpoint
from checkpoints import contents, tensors_of
from comparing import compared
from hub_server import Repo
from packed_experts import (
    EXPERTS,
    encode,
    make_mixture,
    pack_as_unsloth_does_gpt_oss,
    pack_one_by_one,
    pack_stacked,
    save,
)

from nf4conv.options import (
    DequantizeOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
)

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

CPU = RunOptions(device="cpu", workers=2, buffer_size=2 * 65536)
ABOUT = ("components", "quant state", "layout", "one shard", "code maps", "uniform", "experts")
VALUES = ("scales", "names", "copies", "codes", "bound", "tolerance")


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: make_mixture(family, folder / family) for family in ("qwen3_moe", "gpt_oss")}


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


LAYOUTS: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "one by one": ("gpt_oss", lambda source, out: pack_one_by_one("gpt_oss", source, out)),
    "stacked": ("gpt_oss", pack_stacked),
    "Unsloth's names": ("gpt_oss", pack_as_unsloth_does_gpt_oss),
    "stacked qwen3": ("qwen3_moe", pack_stacks_of_qwen3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_beside_its_source(mixtures, tmp_path, layout):
    family, make = LAYOUTS[layout]
    source, packed = mixtures[family], tmp_path / "nf4"
    make(source, packed)
    for a, b in ((source, packed), (packed, source)):
        assert compared(a, b, CPU).within(0.12)
    report = verify_checkpoint(packed, source, None, CPU)
    for name in (*ABOUT, *VALUES):
        faults = [finding.line() for finding in report.findings if finding.check == name]
        assert report.checks[name].passed, faults
    assert {row.error is not None for row in report.weights} == {True}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_model_does_not_pass(mixtures, tmp_path, layout):
    family, make = LAYOUTS[layout]
    make(make_mixture(family, tmp_path / "other", seed=1), tmp_path / "nf4")
    report = verify_checkpoint(tmp_path / "nf4", mixtures[family], None, CPU)
    assert report.checks["names"].passed
    assert not report.checks["source"].passed
    assert not compared(tmp_path / "nf4", mixtures[family], CPU).within(0.12)


def test_single_experts_beside_stacks_in_4_bits(mixtures, tmp_path):
    pack_one_by_one("gpt_oss", mixtures["gpt_oss"], tmp_path / "one")
    pack_stacked(mixtures["gpt_oss"], tmp_path / "stacked")
    for a, b in (("one", "stacked"), ("stacked", "one")):
        found = compared(tmp_path / a, tmp_path / b, CPU)
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
    assert not compared(tmp_path / "less", tmp_path / "stacked", CPU).within(0.2)


def test_parts_make_the_bytes_of_the_whole(mixtures, tmp_path):
    source = mixtures["gpt_oss"]
    options = QuantizeOptions(moe="packed", max_shard_size=60_000)
    quantize_checkpoint(source, tmp_path / "packed", options, CPU)
    back = DequantizeOptions(max_shard_size=150_000)
    dequantize_checkpoint(tmp_path / "packed", tmp_path / "whole", back, CPU)
    for part in ("1/2", "2/2"):
        run = RunOptions(device="cpu", workers=1, buffer_size=65536, part=part)
        dequantize_checkpoint(tmp_path / "packed", tmp_path / "parts", back, run)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 2


def test_a_stream_from_the_hub_is_stacked_too(hub, mixtures, tmp_path):
    options = QuantizeOptions(moe="packed", max_shard_size=60_000)
    quantize_checkpoint(mixtures["gpt_oss"], tmp_path / "packed", options, CPU)
    dequantize_checkpoint(tmp_path / "packed", tmp_path / "expected", run=CPU)
    hub.repos["org/packed"] = Repo()
    hub.repos["org/packed"].commit(contents(tmp_path / "packed"))
    where = SourceOptions(stream=True, cache_dir=tmp_path / "cache")
    dequantize_checkpoint("org/packed", tmp_path / "out", run=CPU, where=where)
    expected = tensors_of(tmp_path / "expected")
    found = tensors_of(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
