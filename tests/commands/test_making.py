"""nf4conv.json, the record of a result's making, and what reruns, inspect and verify do with it."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import contents, write_source
from command_line import run

import nf4conv
from nf4conv.errors import OutputError, SourceError, VerificationError

CPU = {"device": "cpu"}


def stamps(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_the_record(source: Path, tmp_path: Path):
    nf4conv.quantize(source, tmp_path / "out", blocksize=128, **CPU)
    record = json.loads((tmp_path / "out/nf4conv.json").read_text())
    assert (record["schema_version"], record["command"], record["version"]) == (
        2,
        "quantize",
        nf4conv.__version__,
    )
    assert record["options"]["blocksize"] == 128
    assert record["options"]["quant_type"] is None  # left open
    assert record["weights"] == [
        {
            "origin": "packed",
            "from": "bfloat16",
            "quant_type": "nf4",
            "blocksize": 128,
            "double_quant": True,
            "quant_storage": "uint8",
            "scales": "absmax",
            "dtype": "bfloat16",
            "count": 12,
        }
    ]
    assert record["not_packed"] == {"bfloat16": 7}
    assert record["source"]["id"] == "source"
    assert str(tmp_path) not in json.dumps(record)


def test_equal_runs_write_equal_bytes_wherever_the_source_lies(source: Path, tmp_path: Path):
    nf4conv.quantize(source, tmp_path / "a", **CPU)
    moved = shutil.copytree(source, tmp_path / "elsewhere/source")
    nf4conv.quantize(moved, tmp_path / "b", device="cpu", workers=1, buffer_size=100_000)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_a_rerun_of_a_finished_job_does_nothing(source: Path, tmp_path: Path, command: str):
    nf4conv.quantize(source, tmp_path / "packed", **CPU)
    arguments = [
        command,
        str(source if command == "quantize" else tmp_path / "packed"),
        str(tmp_path / "out"),
    ]
    assert run(*arguments).exit_code == 0
    before = stamps(tmp_path / "out")
    again = run(*arguments)
    assert again.exit_code == 0
    assert "; already complete, nothing was done" in again.stdout
    assert json.loads(run(*arguments, "--json").stdout)["already_complete"] is True
    assert stamps(tmp_path / "out") == before


def test_another_job_s_result_is_not_taken_for_this_one_s(source: Path, tmp_path: Path):
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    with pytest.raises(
        OutputError,
        match=r"blocksize was not given and is 128 now\); choose another folder, or --overwrite",
    ):
        nf4conv.quantize(source, tmp_path / "out", blocksize=128, **CPU)
    shard = source / "model-00001-of-00002.safetensors"
    content = shard.read_bytes()
    # trained on: same headers
    shard.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    with pytest.raises(OutputError, match="the source has changed since"):
        nf4conv.quantize(source, tmp_path / "out", **CPU)


def test_a_result_that_lost_a_file_is_not_complete(source: Path, tmp_path: Path):
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    (tmp_path / "out/tokenizer.json").unlink()
    with pytest.raises(OutputError):
        nf4conv.quantize(source, tmp_path / "out", **CPU)


def test_a_rerun_that_asks_for_more(source: Path, tmp_path: Path):
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    with pytest.raises(OutputError, match="is complete, but was not verified"):
        nf4conv.quantize(source, tmp_path / "out", device="cpu", verify=True)
    verify = {"device": "cpu", "verify": True, "overwrite": True}
    first = nf4conv.quantize(source, tmp_path / "out", **verify)
    again = nf4conv.quantize(source, tmp_path / "out", device="cpu", verify=True)
    assert first.verification is not None
    assert again.verification is not None
    assert again.already_complete
    assert again.verification == first.verification
    with pytest.raises(VerificationError, match=r"largest relative error 0.09\d\d, more than 0.01"):
        nf4conv.quantize(source, tmp_path / "out", device="cpu", verify=True, tolerance=0.01)


def test_verify_says_if_the_source_given_is_another(source: Path, tmp_path: Path):
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    assert not nf4conv.verify(tmp_path / "out", source=source, **CPU).findings
    other = write_source(tmp_path / "other", layers=8)
    noted = [
        finding.text for finding in nf4conv.verify(tmp_path / "out", source=other, **CPU).findings
    ]
    assert "it was made from source, whose tensors are not those of the source given" in noted


@pytest.mark.parametrize("command", ["inspect", "verify", "quantize"])
def test_an_unfinished_result_is_recognised(source: Path, tmp_path: Path, command: str):
    shard = source / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b"\xc0\x7f")  # a NaN stops the run
    with pytest.raises(SourceError, match="NaN"):
        nf4conv.quantize(source, tmp_path / "out", **CPU)
    target = [str(tmp_path / "again")] if command == "quantize" else []
    done = run(command, tmp_path / "out", *target)
    assert done.exit_code == 2
    assert "an unfinished run of nf4conv, in which " in done.stderr
    assert "the same command as before goes on with it" in done.stderr


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"options": 1}', b"[" * 10**5, b'{"options": {}, "source": {}}'],
    ids=["empty", "list", "cut", "wrong", "deep", "bare"],
)
def test_a_record_of_somebody_else_s_making_stops_nothing(
    source: Path, tmp_path: Path, content: bytes
):
    nf4conv.quantize(source, tmp_path / "out", **CPU)
    (tmp_path / "out/nf4conv.json").write_bytes(content)
    for command in ("inspect", "verify"):
        done = run(command, tmp_path / "out")
        assert done.exit_code == 0, done.output
    assert nf4conv.verify(tmp_path / "out", source=source, **CPU).passed
