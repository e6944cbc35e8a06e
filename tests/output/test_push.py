"""--push-to-hub: private unless asked, shards go up while later ones are made, one commit makes
them a model.
"""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import pushed
from click.testing import CliRunner
from hub_server import Fault, Hub, Repo
from huggingface_hub import constants

import nf4conv
import nf4conv.output.push as push_module
import nf4conv.sources.remote.asking as asking_module
from nf4conv.cli import main
from nf4conv.errors import Nf4convError, OutputError
from nf4conv.report.results import RunReport

REPO = "me/model-nf4"
TOKEN = "hf_writer"
OPTIONS = {"max_shard_size": 60_000}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "WAITS", (0.01, 0.01))


def push(
    source: Path,
    out: Path,
    *,
    overwrite: bool = False,
    after_read: Callable[[], object] = lambda: None,
    **options: Any,
) -> RunReport:
    """Quantize and push; `after_read` is called after every read."""
    chosen = {**({"push_to_hub": REPO, "token": TOKEN} | options)}
    run = {"device": "cpu", "workers": 2, "overwrite": overwrite}
    return nf4conv.quantize(
        source, out, **OPTIONS, **run, progress=lambda _: after_read(), **chosen
    )


def test_what_is_pushed_is_the_folder(hub: Hub, source: Path, tmp_path: Path):
    report = push(source, tmp_path / "out")
    repo = hub.repos[REPO]
    files = dict(repo.files)
    del files[".gitattributes"]
    assert files == pushed(tmp_path / "out", REPO)
    assert len([name for name in files if name.endswith(".safetensors")]) > 3
    assert repo.private
    assert report.pushed == f"{hub.url}/{REPO}/commit/{repo.head}"
    assert len(repo.commits) == 2, "the empty repository, and the model"


def test_public_is_asked_for(hub: Hub, source: Path, tmp_path: Path):
    push(source, tmp_path / "out", public=True)
    assert not hub.repos[REPO].private


def test_shards_go_up_while_later_ones_are_made(hub: Hub, source: Path, tmp_path: Path):
    """The first upload is answered only when a shard has been finished after it, and none is in the
    repository yet.
    """
    out = tmp_path / "out"
    seen: list[tuple[int, int]] = []
    has_come = threading.Event()

    def wait_for_upload() -> None:
        if any(out.glob("*.safetensors")):
            assert has_come.wait(60)

    def wait_for_more() -> None:
        before = len(list(out.glob("*.safetensors")))
        has_come.set()
        deadline = time.monotonic() + 60
        while len(list(out.glob("*.safetensors"))) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append((before, len(list(out.glob("*.safetensors")))))
        assert ".safetensors" not in str(list(hub.repos[REPO].files))

    hub.faults = [Fault("PUT /upload/", call=wait_for_more)]
    push(source, out, after_read=wait_for_upload)
    [(before, after)] = seen
    assert after > before


def test_an_interrupted_run_pushes_nothing_and_the_next_one_the_rest(
    hub: Hub, source: Path, tmp_path: Path
):
    out = tmp_path / "out"
    weights = source / "model-00002-of-00002.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(
        good[:-6] + torch.full((3,), float("nan")).bfloat16().view(torch.uint8).numpy().tobytes()
    )
    with pytest.raises(Nf4convError, match="NaN"):
        push(source, out)
    assert list(hub.repos[REPO].files) == [".gitattributes"]
    weights.write_bytes(good)
    uploaded = hub.count("PUT /upload/")
    push(source, out, overwrite=True)
    shards = [name for name in hub.repos[REPO].files if name.endswith(".safetensors")]
    assert hub.count("PUT /upload/") <= max(len(shards) + 4, uploaded + len(shards))
    assert set(shards) == {path.name for path in out.glob("*.safetensors")}


# --- what is refused before anything is computed --------------------------------------------------


def test_without_a_token(hub: Hub, source: Path, tmp_path: Path):
    with pytest.raises(OutputError, match=rf"^--push-to-hub {REPO}: .*401"):
        push(source, tmp_path / "out", token=False)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert hub.repos == {}


def test_a_repository_with_weights(hub: Hub, source: Path, tmp_path: Path):
    hub.repos[REPO] = Repo(token=TOKEN, private=True)
    hub.repos[REPO].commit({"model-00001-of-00099.safetensors": b"old", "notes.md": b"mine"})
    with pytest.raises(
        OutputError, match=r"holds weights already \(model-00001-of-00099.safetensors\)"
    ):
        push(source, tmp_path / "out")
    push(source, tmp_path / "other", overwrite=True)
    files = hub.repos[REPO].files
    assert "model-00001-of-00099.safetensors" not in files, (
        "loaders would read it along with the new ones"
    )
    assert files["notes.md"] == b"mine"


def test_a_public_repository_without_public(hub: Hub, source: Path, tmp_path: Path):
    hub.repos[REPO] = Repo(token=TOKEN, private=False)
    hub.repos[REPO].commit({})
    with pytest.raises(OutputError, match="is public; say --public if you mean it"):
        push(source, tmp_path / "out")
    push(source, tmp_path / "out", public=True)


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST .*/preupload/", times=2, status=503),
        Fault("POST .*/objects/batch", times=2, status=500),
        Fault("PUT /upload/", times=2, status=500),
    ],
    ids=["preupload", "batch", "put"],
)
def test_a_passing_fault_changes_nothing(
    hub: Hub, source: Path, tmp_path: Path, fault: Fault, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time, "sleep", lambda _: None)
    hub.faults = [fault]
    push(source, tmp_path / "out")
    assert fault.times == 0
    assert pushed(tmp_path / "out", REPO).items() <= hub.repos[REPO].files.items()


@pytest.mark.parametrize("step", ["POST .*/preupload/", "POST .*/commit/"])
def test_when_the_hub_refuses_the_checkpoint_is_complete_all_the_same(
    hub: Hub, source: Path, tmp_path: Path, step: str
):
    out = tmp_path / "out"
    hub.faults = [
        Fault(step, times=99, status=403, headers={"X-Error-Message": "Storage quota exceeded"})
    ]
    complaint = (
        rf"^--push-to-hub {REPO}: .*quota exceeded.*; the checkpoint itself is complete, "
        rf".*: hf upload {REPO} {out} \.$"
    )
    with pytest.raises(Nf4convError, match=complaint):
        push(source, out)
    assert (out / "config.json").exists()
    assert not (out / ".nf4conv").exists()
    assert hub.count(step) <= 2


def test_a_hub_that_falls_silent_within_an_answer(
    hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """huggingface_hub itself would wait for ever for the rest."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(push_module, "_SILENCE", 1)
    longer = {"Content-Length": "1000"}
    hub.faults = [
        Fault("POST .*/commit/", change=lambda answer: (answer[0], answer[1], answer[2] | longer))
    ]
    with pytest.raises(Nf4convError, match=r"the checkpoint itself is complete"):
        push(source, tmp_path / "out")


def test_the_command(hub: Hub, source: Path, tmp_path: Path):
    arguments = [
        "quantize",
        str(source),
        str(tmp_path / "out"),
        "--device",
        "cpu",
        "--push-to-hub",
        REPO,
    ]
    done = CliRunner().invoke(main, [*arguments, "--token", TOKEN, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["pushed"].startswith(f"{hub.url}/{REPO}/commit/")
    assert TOKEN not in done.output
    assert {request.token for request in hub.requests if "/upload/" not in request.line} == {TOKEN}
