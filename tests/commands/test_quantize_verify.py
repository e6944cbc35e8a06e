"""`quantize --verify`: the figures of `verify`, in the same pass; a fault between codec and disk is
found by name.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import command_line
import pytest
from checkpoints import contents
from hub_server import Hub, Repo

import nf4conv
from nf4conv.errors import VerificationError
from nf4conv.output.writer import ShardWriter

CPU = {"device": "cpu", "workers": 2}
VERIFY = {"device": "cpu", "workers": 2, "verify": True}
SMALL = {"device": "cpu", "workers": 2, "buffer_size": 1, "verify": True}


def agrees(out: Path, source: Path, summary: Any) -> None:
    """With what `verify` finds of the same."""
    report = nf4conv.verify(out, source=source, **CPU)
    assert report.passed, [finding.line() for finding in report.findings]
    assert len(report.weights) == summary.packed
    assert summary.largest_relative_error == round(max(row.error for row in report.weights), 6)


@pytest.mark.parametrize("run", [VERIFY, SMALL], ids=["buffers", "small buffers"])
@pytest.mark.parametrize("options", [
    {"max_shard_size": 60_000},
    {"quant_type": "fp4", "blocksize": 128, "double_quant": False},
    {"dtype": "float32"}, {"dtype": "float16"},
], ids=["shards", "fp4", "float32", "float16"])  # fmt: skip
def test_it_finds_what_verify_finds(
    source: Path, tmp_path: Path, options: dict[str, Any], run: dict[str, Any]
):
    report = nf4conv.quantize(source, tmp_path / "out", **options, **run)
    assert report.verification is not None
    assert report.verification.copied == 7
    agrees(tmp_path / "out", source, report.verification)
    nf4conv.quantize(source, tmp_path / "without", **options, **CPU)
    with_it, without = contents(tmp_path / "out"), contents(tmp_path / "without")
    assert b"every value against the original" in with_it.pop("README.md")
    without.pop("README.md")
    made, made_without = (json.loads(files.pop("nf4conv.json")) for files in (with_it, without))
    assert made == made_without | {"verified": asdict(report.verification)}
    assert with_it == without


def test_a_streamed_source_is_compared_before_it_is_dropped(hub: Hub, source: Path, tmp_path: Path):
    hub.repos["org/model"] = Repo()
    hub.repos["org/model"].commit(contents(source))
    where = {"cache_dir": tmp_path / "cache", "stream": True}
    report = nf4conv.quantize("org/model", tmp_path / "out", **VERIFY, **where)
    agrees(tmp_path / "out", source, report.verification)
    assert not list((tmp_path / "cache").rglob("model-*.safetensors"))


class Faulty:
    """Flips a bit of what is written, once, where `offset` of a shard's data is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
        self.left = 1
        genuine = ShardWriter.write

        def write(writer: ShardWriter, at: int, data: memoryview) -> None:
            if self.left and at >= 0 and at <= offset < at + len(data):
                self.left = 0
                damaged = bytearray(data)
                damaged[offset - at] ^= 0x40
                data = memoryview(damaged)
            genuine(writer, at, data)

        monkeypatch.setattr(ShardWriter, "write", write)


def offset_of(source: Path, name: str, suffix: str) -> int:
    """In the data of the single output shard."""
    for job in nf4conv.plan_quantize(source).made.output.jobs:
        if job.name == name:
            if not suffix and hasattr(job, "offset"):
                return int(job.offset)
            return int(
                job.offsets[[component.suffix for component in job.components].index(suffix)]
            )
    raise AssertionError(name)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("name", "suffix"),
    [(UP, ""), (UP, "absmax"), (UP, "nested_absmax"), ("model.embed_tokens.weight", "")],
    ids=["codes", "absmax", "nested_absmax", "kept"],
)
def test_a_bit_that_flips_on_the_way_to_the_disk(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        fault = Faulty(patched, offset_of(source, name, suffix) + 3)
        with pytest.raises(VerificationError, match=rf"out: verification failed: {name}: "):
            nf4conv.quantize(source, out, **VERIFY)
        assert fault.left == 0
    assert not (out / "config.json").exists()
    assert not (out / "README.md").exists()
    nf4conv.quantize(source, out, **VERIFY)
    nf4conv.quantize(source, tmp_path / "good", **VERIFY)
    assert contents(out) == contents(tmp_path / "good")


def test_shards_of_an_earlier_run_are_looked_at_as_well(source: Path, tmp_path: Path):
    """Interrupted without --verify, completed with it: everything is compared."""

    class Interrupt(Exception):  # noqa: N818
        pass

    options, out, seen = {"max_shard_size": 60_000}, tmp_path / "out", 0

    def stop(count: int) -> None:
        nonlocal seen
        seen += count
        if seen > 400_000:
            raise Interrupt

    with pytest.raises(Interrupt):
        nf4conv.quantize(source, out, **options, device="cpu", workers=1, progress=stop)
    assert list(out.glob("*.safetensors"))
    report = nf4conv.quantize(source, out, **options, **VERIFY)
    agrees(out, source, report.verification)


@pytest.mark.parametrize(("tolerance", "code"), [("0.05", 1), ("0.2", 0)])
def test_the_command(source: Path, tmp_path: Path, tolerance: str, code: int):
    command = [
        "quantize",
        str(source),
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--verify",
        "--tolerance",
        tolerance,
    ]
    done = command_line.run(*command)
    assert done.exit_code == code, done.output
    if code:
        assert "verification failed: model.layers." in done.stderr
        assert "relative error 0.09" in done.stderr
    else:
        assert "verified: 12 packed weights, largest relative error 0.09" in done.stdout
