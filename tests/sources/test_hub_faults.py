"""A Hub that is silent, breaks off, is busy, or delivers other bytes than it states."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import contents, write_source
from click.testing import CliRunner
from hub_server import HUB, Fault, Hub, Repo
from huggingface_hub import constants

import nf4conv.sources.remote.asking as asking
from nf4conv.cli import main
from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.opening import open_source
from nf4conv.sources.remote import repository

REPO = "some-org/model"
SHARD = r"GET /cdn/.*00001-of"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(asking, "WAITS", (0.01, 0.02, 0.03))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    HUB.clear()
    repo = Repo()
    repo.commit(contents(write_source(tmp_path / "published")))
    HUB.repos[REPO] = repo
    yield HUB
    HUB.clear()


@pytest.fixture
def where(tmp_path: Path) -> SourceOptions:
    return SourceOptions(cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Waits until the test is over; a client waits for half a second."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    over = threading.Event()

    def wait() -> None:
        over.wait(60)

    yield wait
    over.set()


def inspect(*options: str) -> str:
    done = CliRunner().invoke(main, ["inspect", REPO, *options])
    assert done.exit_code == 2, done.output
    # after the progress of what was fetched before
    return done.stderr.rpartition("\r")[2].partition("Error: ")[2]


# --- silence and breaks ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", [SHARD, "GET /api/models"])
def test_a_silent_hub_is_given_up(
    hub: Hub, where: SourceOptions, silence: Callable[[], None], path: str
):
    hub.faults = [Fault(path, times=99, call=silence)]
    started = time.monotonic()
    error = inspect("--cache-dir", str(where.cache_dir))
    assert error.startswith("some-org/model")
    assert error.count("\n") == 1
    assert hub.count(path) == 4  # once, and after each wait
    assert time.monotonic() - started < 30  # four times the default would be 40


@pytest.mark.parametrize("path", [SHARD, "GET /api/models"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again(hub: Hub, where: SourceOptions, path: str, status: int):
    hub.faults = [Fault(path, times=2, status=status)]
    source = open_source(REPO, SourceOptions(cache_dir=where.cache_dir, stream=True))
    assert source.tensors
    assert hub.faults[0].times == 0


def test_a_range_that_breaks_off_is_asked_for_again(hub: Hub, where: SourceOptions):
    hub.faults = [Fault(SHARD, times=2, cut=10)]
    source = open_source(REPO, SourceOptions(cache_dir=where.cache_dir, stream=True))
    assert source.tensors
    assert hub.faults[0].times == 0


def test_a_range_that_always_breaks_off_is_refused_in_one_line(hub: Hub, where: SourceOptions):
    hub.faults = [Fault(SHARD, times=99, cut=10)]
    error = inspect("--cache-dir", str(where.cache_dir))
    assert error.startswith(f"{REPO}/model-00001-of")
    assert "bug" not in error
    assert error.count("\n") == 1


@pytest.mark.usefixtures("hub")
def test_nobody_there_is_said_soon():
    waited: list[float] = []

    def unreachable() -> None:
        raise ConnectError("no route")

    with pytest.raises(OSError, match="no route"):
        asking.patiently(unreachable, waited.append)
    assert waited == [0.01]


class ConnectError(OSError):
    """As httpx names it."""


# --- other bytes ----------------------------------------------------------------------------------


def test_other_bytes_of_the_same_size_are_fetched_again(hub: Hub, where: SourceOptions):
    hub.faults = [Fault(SHARD, corrupt=True)]
    source = open_source(REPO, where)
    assert source.tensors
    name = "model-00001-of-00002.safetensors"
    assert (source.folder / name).read_bytes() == hub.repos[REPO].files[name]
    assert hub.count(SHARD) == 2


@pytest.mark.parametrize("name", ["00001-of", "tokenizer.json"])
def test_a_hub_that_always_delivers_other_bytes_is_refused(
    hub: Hub, where: SourceOptions, name: str
):
    hub.faults = [Fault(rf"GET /.*{name}", times=99, corrupt=True)]
    with pytest.raises(SourceError, match=rf"{name}.*: its hash is not .*, twice"):
        open_source(REPO, where)


@pytest.mark.usefixtures("hub")
def test_what_is_in_the_cache_is_not_read_again(
    where: SourceOptions, monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []
    check = repository.check_content

    def watched(path: Path, file: repository.RemoteFile) -> str | None:
        read.append(file.name)
        return check(path, file)

    monkeypatch.setattr(repository, "check_content", watched)
    folder = open_source(REPO, where).folder
    assert "model-00001-of-00002.safetensors" in read
    read.clear()
    lost = folder / "tokenizer.json"
    lost.unlink()
    lost.resolve().unlink(missing_ok=True)
    assert open_source(REPO, where).tensors
    assert read == ["tokenizer.json"]


def of_file(**fields: object) -> bytes:
    answer = {"id": "a/b", "sha": "a" * 40, "siblings": [{"rfilename": "a", **fields}]}
    return json.dumps(answer).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Sign in to the hotel's network</html>",
        b"null",
        b"[]",
        b"[" * 5000,
        b'{"siblings": [5], "sha": "x"}',
        b'{"id": "a/b", "sha": "../../x", "siblings": []}',
        of_file(rfilename="../x"),
        of_file(rfilename=5),
        of_file(size=-1),
        of_file(blobId=5),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_answers_that_make_no_sense(hub: Hub, where: SourceOptions, body: bytes):
    hub.faults = [Fault("GET /api/models", times=99, change=lambda _: (200, body, {}))]
    error = inspect("--cache-dir", str(where.cache_dir))
    assert error.startswith(f"{REPO}: ")
    assert "bug" not in error
    assert error.count("\n") == 1


# --- no network -----------------------------------------------------------------------------------


def offline(tmp_path: Path, url: str, *arguments: object) -> str:
    """Returns the error of a command in a process of its own, because huggingface_hub reads the
    address when it is imported.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    environment = {
        "HF_ENDPOINT": url.format(port=port),
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": "hf_token",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "nf4conv", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://no-such-host.invalid"])
def test_no_network(tmp_path: Path, url: str):
    error = offline(tmp_path, url, "inspect", REPO)
    assert re.fullmatch(
        rf"Error: {REPO}: .+; you seem offline; what was downloaded before is read with "
        r"--local-files-only, or HF_HUB_OFFLINE=1\n",
        error,
    ), error


def test_no_network_to_push_to(source: Path, tmp_path: Path):
    """Nothing is computed for a result that cannot be pushed."""
    out = tmp_path / "out"
    asked = ["quantize", source, out, "--device", "cpu", "--push-to-hub", "me/x"]
    error = offline(tmp_path, "http://127.0.0.1:{port}", *asked)
    assert re.fullmatch(r"Error: --push-to-hub me/x: .+; you seem offline\n", error)
    assert not out.exists()
