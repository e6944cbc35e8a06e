"""What to do where the Hub cannot be reached, or does not give a model away."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import contents, write_source
from click.testing import CliRunner
from hub_server import Hub, Repo

from nf4conv.cli import main

REPO = "some-org/model"
ROOT = Path(__file__).parents[2]


def error_of(*arguments: object) -> str:
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 2, done.output
    return done.stderr.rpartition("\r")[2].partition("Error: ")[2].strip()


def published(hub: Hub, tmp_path: Path, **attributes: object) -> None:
    hub.repos[REPO] = Repo(**attributes)
    hub.repos[REPO].commit(contents(write_source(tmp_path / "published")))


def closed_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "http://no-such-host.invalid"])
def test_no_network(tmp_path: Path, url: str):
    """In a process of its own, because huggingface_hub reads the address when it is imported."""
    environment = {
        "HF_ENDPOINT": url.format(port=closed_port()),
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "nf4conv", "inspect", REPO]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert re.fullmatch(
        rf"Error: {REPO}: .+; you seem offline; what was downloaded before is read with "
        r"--local-files-only, or HF_HUB_OFFLINE=1\n",
        done.stderr,
    ), done.stderr


@pytest.mark.usefixtures("hub")
def test_nothing_may_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = ["inspect", REPO, "--cache-dir", tmp_path]
    error = error_of(*asked, "--local-files-only")
    assert error == (
        f"{REPO}: not in the cache, and the hub may not be asked (--local-files-only); run once "
        f"without that, to download it"
    )
    monkeypatch.setattr("nf4conv.sources.remote.hub.is_offline", lambda: True)
    assert "(HF_HUB_OFFLINE is set)" in error_of(*asked)


def test_a_gated_repository(hub: Hub, tmp_path: Path):
    published(hub, tmp_path, token="hf_owner", gated=True)
    error = error_of("quantize", REPO, tmp_path / "out", "--cache-dir", tmp_path / "cache")
    assert error.endswith(
        f"; accept the conditions at {hub.url}/{REPO}, and log in with `hf auth login`, or set "
        f"HF_TOKEN"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("hub")
def test_a_private_repository_or_none(tmp_path: Path):
    error = error_of("inspect", REPO, "--cache-dir", tmp_path)
    assert error.endswith("; if the name is right, log in with `hf auth login`, or set HF_TOKEN")


def test_what_is_wrong_otherwise_gets_no_hint(hub: Hub, tmp_path: Path):
    published(hub, tmp_path)
    error = error_of("inspect", REPO, "--cache-dir", tmp_path, "--revision", "never")
    assert "Invalid rev id: never" in error
    assert "hf auth login" not in error
    assert "offline" not in error


def test_no_network_to_push_to(tmp_path: Path):
    """Nothing is computed for a result that cannot be pushed."""
    source = write_source(tmp_path / "source")
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}",
        "HF_HOME": str(tmp_path),
        "HF_TOKEN": "hf_token",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "nf4conv", "quantize", str(source), str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--device", "cpu", "--push-to-hub", "me/x"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch(r"Error: --push-to-hub me/x: .+; you seem offline\n", done.stderr)
    assert not (tmp_path / "out").exists()
