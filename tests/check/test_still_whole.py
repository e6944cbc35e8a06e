"""A finished result is looked at before it is called complete."""

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import contents, write_source
from click.testing import CliRunner

import nf4conv
from nf4conv.cli import main
from nf4conv.errors import Nf4convError, VerificationError

RUN = {"device": "cpu", "workers": 1}
OPTIONS = {"max_shard_size": 60_000}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("here") / "source", layers=2)


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


def empty(shard: Path) -> None:
    shard.write_bytes(b"")


def flip_header(shard: Path) -> None:
    flip(shard, 20)


def flip_data(shard: Path) -> None:
    """In the codes, of which every one is valid."""
    header = int.from_bytes(shard.read_bytes()[:8], "little")
    flip(shard, 8 + header + (shard.stat().st_size - header) // 3)


def flip(shard: Path, position: int) -> None:
    content = bytearray(shard.read_bytes())
    content[position] ^= 1
    shard.write_bytes(content)


def delete(shard: Path) -> None:
    shard.unlink()


def largest(out: Path) -> Path:
    return max(out.glob("*.safetensors"), key=lambda path: path.stat().st_size)


DAMAGES = [truncate, empty, flip_header, delete]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_refused_by_name(
    source: Path, tmp_path: Path, damage: Callable[[Path], None]
):
    out = tmp_path / "out"
    nf4conv.quantize(source, out, **OPTIONS, **RUN)
    shard = largest(out)
    damage(shard)
    before = contents(out)
    arguments = ["quantize", str(source), str(out), "--max-shard-size", "60kB"]
    done = CliRunner().invoke(main, arguments)
    assert isinstance(done.exception, SystemExit | Nf4convError)
    assert shard.name in done.stderr
    assert "--overwrite makes the result anew" in done.stderr
    assert contents(out) == before


def test_verify_looks_again(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    run = {**RUN, "verify": True}
    first = nf4conv.quantize(source, out, **OPTIONS, **run)
    again = nf4conv.quantize(source, out, **OPTIONS, **run)
    assert again.already_complete
    assert again.verification is not None
    assert first.verification is not None
    assert again.verification == first.verification
    flip_data(largest(out))
    with pytest.raises(VerificationError, match=r"verification failed: .*makes it anew"):
        nf4conv.quantize(source, out, **OPTIONS, **run)
    assert nf4conv.quantize(source, out, **OPTIONS, **{**run, "overwrite": True}).verification
