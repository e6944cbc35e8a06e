"""--stream: the bytes of the local run, at most two source shards on disk, and every fault survived
or refused.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from hub_server import Fault, Hub, Repo
from safetensors.torch import save

import nf4conv
import nf4conv.sources.remote.asking as asking_module
from nf4conv.errors import OutputError, SourceError, VerificationError
from nf4conv.format.units import size
from nf4conv.options import SourceOptions
from nf4conv.sources.header import read_header
from nf4conv.sources.remote.hub import Fetched, Origin
from nf4conv.sources.remote.repository import Repository
from nf4conv.sources.remote.stream import ShardStream

REPO = "some-org/model"
CONFIG = json.dumps(
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
).encode()
SHARDS = 6
WEIGHTS = (".safetensors", ".incomplete")
OPTIONS = {"max_shard_size": 100_000}


def checkpoint(shards: int = SHARDS) -> dict[str, bytes]:
    """A checkpoint of a few shards, about 200 kB each; layers go across shards, and norms are many
    in each.
    """
    generator = torch.Generator().manual_seed(0)
    files, weight_map = (
        {"config.json": CONFIG, "tokenizer.json": b"{}", "README.md": b"# A model\n"},
        {},
    )
    for number in range(1, shards + 1):
        tensors = {
            f"model.layers.{number}.mlp.up_proj.weight": torch.randn(
                512, 128, generator=generator
            ).bfloat16()
        }
        tensors[f"model.layers.{number}.mlp.down_proj.weight"] = torch.randn(
            128, 256, generator=generator
        ).bfloat16()
        tensors |= {
            f"model.layers.{number}.norm{i}.weight": torch.ones(128).bfloat16() for i in range(5)
        }
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        files[name] = save(tensors)
        weight_map |= dict.fromkeys(tensors, name)
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "WAITS", (0.01, 0.01))


@pytest.fixture
def where(tmp_path: Path) -> dict[str, Any]:
    return {"cache_dir": tmp_path / "cache", "stream": True}


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    """The output that the same checkpoint gives from a local folder."""
    return converted_locally(tmp_path, checkpoint())


def converted_locally(tmp_path: Path, files: dict[str, bytes]) -> dict[str, bytes]:
    folder, out = tmp_path / "local", tmp_path / "local-out"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    nf4conv.quantize(folder, out, **OPTIONS, device="cpu", workers=2)
    return without_card(contents(out))


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    return {
        name: content
        for name, content in files.items()
        if name not in ("README.md", "nf4conv.json")
    }


def publish(hub: Hub, files: dict[str, bytes], **attributes: Any) -> Repo:
    hub.repos[REPO] = Repo(**attributes)
    hub.repos[REPO].commit(files)
    return hub.repos[REPO]


def stream(out: Path, where: dict[str, Any], **run: Any) -> dict[str, bytes]:
    nf4conv.quantize(REPO, out, **OPTIONS, device="cpu", **({"workers": 2} | run), **where)
    return without_card(contents(out))


@contextmanager
def watched(out: Path) -> Iterator[list[int]]:
    """The bytes of source files, whole or in parts, that were on disk, a few hundred times a
    second.
    """
    sizes: list[int] = [0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            with suppress(FileNotFoundError):
                found = [
                    path for path in (out / ".nf4conv/source").rglob("*") if path.suffix in WEIGHTS
                ]
                sizes.append(sum(path.stat().st_size for path in found))
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield sizes
    finally:
        stop.set()
        thread.join()


def test_the_result_is_that_of_the_folder(
    hub: Hub, where: dict[str, Any], expected: dict[str, bytes], tmp_path: Path
):
    publish(hub, checkpoint())
    assert stream(tmp_path / "out", where) == expected
    for number in range(1, SHARDS + 1):
        # the header, then the file
        assert hub.count(rf"GET /cdn/.*/model-0000{number}-of.*safetensors$") in (
            2,
            3,
        )


@pytest.mark.parametrize("workers", [1, 3])
def test_at_most_two_shards_are_on_disk(
    hub: Hub, where: dict[str, Any], tmp_path: Path, workers: int
):
    files = checkpoint()
    publish(hub, files)
    hub.faults = [Fault(r"GET /cdn/.*safetensors$", times=99, seconds=0.02)]
    shards = sorted(len(content) for name, content in files.items() if name.endswith(WEIGHTS))
    plan = nf4conv.plan_quantize(REPO, **OPTIONS, **where).made
    needed = sum(shards[-2:]) + plan.output.largest_size
    assert plan.notes[-1] == (
        f"streams: at most {size(sum(shards[-2:]))} of the source, two files, are on disk at a "
        f"time; with the result up to {size(needed)}"
    )
    assert needed <= plan.space_needed(()) < needed + 10_000
    with watched(tmp_path / "out") as sizes:
        stream(tmp_path / "out", where, workers=workers)
    assert 0 < max(sizes) <= sum(shards[-2:])
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "a copy was kept"


def test_one_shard_ahead_and_no_further(hub: Hub, where: dict[str, Any], tmp_path: Path):
    publish(hub, checkpoint())
    repository = Repository(REPO, SourceOptions(**where))
    files = {
        Path(name): file
        for name, file in sorted(repository.files.items())
        if name.endswith(".safetensors")
    }
    paths = list(files)
    order = {path: number for number, path in enumerate(paths)}
    fetched = Fetched(Path(), Origin(REPO, repository.commit, ""), repository, files)
    folder = tmp_path / "source"
    with ShardStream(fetched, order=order, needed=paths[:4], folder=folder) as stream:
        for number in (0, 1):
            stream.expect(paths[number])
            stream.wait_for(paths[number])
        time.sleep(0.3)
        assert hub.count("00003-of") == 0, "a third shard was fetched while the first was in use"
        stream.done(paths[0])
        stream.expect(paths[2])
        stream.wait_for(paths[2])
        assert sorted(contents(tmp_path / "source").keys() & repository.files.keys()) == [
            str(paths[1]),
            str(paths[2]),
        ]


def test_planning_fetches_headers_only(hub: Hub, where: dict[str, Any]):
    files = checkpoint()
    publish(hub, files)
    plan = nf4conv.plan_quantize(REPO, **OPTIONS, **where).made
    assert len(plan.source.tensors) == 7 * SHARDS
    ranges = [
        request.range
        for request in hub.requests
        if request.line.endswith(".safetensors") and request.range
    ]
    assert len(ranges) >= SHARDS
    assert all(
        request.range or request.status == 302
        for request in hub.requests
        if "safetensors" in request.line[-12:]
    )


def test_what_the_cache_has_is_not_fetched(
    hub: Hub, where: dict[str, Any], expected: dict[str, bytes], tmp_path: Path
):
    publish(hub, checkpoint())
    nf4conv.plan_quantize(REPO, **OPTIONS, cache_dir=where["cache_dir"])
    hub.requests.clear()
    assert stream(tmp_path / "out", where) == expected
    assert hub.count("cdn") == 0


def test_parts_of_a_weight_in_another_shard(hub: Hub, where: dict[str, Any], tmp_path: Path):
    """A scale is asked for by range when its shard is not the one on disk."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(3)]
    shards = [
        {f"{name}_scale_inv": torch.rand(2, 1, generator=generator) for name in names},
        *(
            {name: torch.randn(256, 128, generator=generator).to(torch.float8_e4m3fn)}
            for name in names
        ),
    ]
    config = json.loads(CONFIG) | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}
    }
    files, weight_map = {"config.json": json.dumps(config).encode()}, {}
    for number, tensors in enumerate(shards):
        files[f"model-{number}.safetensors"] = save(tensors)
        weight_map |= dict.fromkeys(tensors, f"model-{number}.safetensors")
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    publish(hub, files)
    assert stream(tmp_path / "out", where) == converted_locally(tmp_path, files)


# --- faults ---------------------------------------------------------------------------------------

SECOND = r"GET /cdn/.*00002-of"


@contextmanager
def after_the_headers(hub: Hub, *faults: Fault) -> Iterator[None]:
    """Set faults once planning, which reads headers, is over: at the first request for a whole
    shard.
    """
    hub.faults = [Fault(r"HEAD .*00001-of", call=lambda: hub.faults.extend(faults))]
    yield


@pytest.mark.parametrize(
    "fault",
    [
        Fault(SECOND, cut=50_000),
        Fault(SECOND, corrupt=True),
        Fault(SECOND, seconds=0.1),
        Fault(r"HEAD .*00002-of", times=2, status=503),
        Fault(SECOND, times=2, status=429, headers={"Retry-After": "0"}),
        Fault(SECOND, times=2, status=500),
    ],
    ids=["cut", "corrupt", "slow", "503", "429", "500"],
)
def test_a_passing_fault_changes_nothing(
    hub: Hub,
    where: dict[str, Any],
    expected: dict[str, bytes],
    tmp_path: Path,
    fault: Fault,
    monkeypatch: pytest.MonkeyPatch,
):
    if fault.seconds == 0:
        monkeypatch.setattr(time, "sleep", lambda _: None)
    publish(hub, checkpoint())
    with after_the_headers(hub, fault):
        assert stream(tmp_path / "out", where) == expected
    assert hub.faults[-1].times == 0, "the fault never happened"
    assert hub.count(SECOND) <= 6


def test_a_shard_that_stays_damaged_is_refused(hub: Hub, where: dict[str, Any], tmp_path: Path):
    publish(hub, checkpoint())
    refused = pytest.raises(
        SourceError, match=r"some-org/model/model-00002-of.*: its hash is not \w{64}, .*, twice"
    )
    with after_the_headers(hub, Fault(SECOND, times=99, corrupt=True)), refused:
        stream(tmp_path / "out", where)
    assert hub.count(SECOND) == 3, "the header, the file, and the file again"
    assert not (tmp_path / "out/config.json").exists()


@pytest.mark.parametrize(
    ("status", "headers", "explanation"),
    [
        (
            403,
            {"X-Error-Code": "GatedRepo", "X-Error-Message": "Ask for access."},
            "gated repo .* Ask for access",
        ),
        (404, {"X-Error-Code": "EntryNotFound"}, "Entry Not Found"),
        (401, {"X-Error-Code": "RepoNotFound"}, "Repository Not Found"),
    ],
)
def test_what_waiting_cannot_mend_is_not_tried_again(
    hub: Hub,
    where: dict[str, Any],
    tmp_path: Path,
    status: int,
    headers: dict[str, str],
    explanation: str,
):
    publish(hub, checkpoint())
    with (
        after_the_headers(hub, Fault(r"HEAD .*00003-of", times=99, status=status, headers=headers)),
        pytest.raises(SourceError, match=f"model-00003-of-00006.safetensors: .*{explanation}"),
    ):
        stream(tmp_path / "out", where)
    assert hub.count(r"HEAD .*00003-of") == 1


def test_an_interrupted_run_is_resumed(
    hub: Hub, where: dict[str, Any], expected: dict[str, bytes], tmp_path: Path
):
    publish(hub, checkpoint())
    out = tmp_path / "out"
    with (
        after_the_headers(hub, Fault(r"HEAD .*00005-of", times=99, status=403)),
        pytest.raises(SourceError),
    ):
        stream(out, where)
    finished = [path.name for path in out.glob("*.safetensors")]
    assert finished
    before = {name: (out / name).stat().st_mtime_ns for name in finished}
    hub.faults.clear()
    hub.requests.clear()
    with watched(out) as sizes:
        assert stream(out, where) == expected
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == before, (
        "a finished shard was made again"
    )
    assert hub.count(r"HEAD .*00001-of") == 0, "a source shard that is no longer needed was fetched"
    assert max(sizes) <= 2 * max(map(len, checkpoint().values()))


def test_a_new_commit_is_another_run(hub: Hub, where: dict[str, Any], tmp_path: Path):
    repo = publish(hub, checkpoint())
    with (
        after_the_headers(hub, Fault(r"HEAD .*00005-of", times=99, status=403)),
        pytest.raises(SourceError),
    ):
        stream(tmp_path / "out", where)
    hub.faults.clear()
    repo.commit(checkpoint() | {"tokenizer.json": b"{} "})
    with pytest.raises(OutputError, match="unfinished run that differs in source files"):
        stream(tmp_path / "out", where)


def test_an_error_elsewhere_does_not_wait_for_the_download(
    hub: Hub, where: dict[str, Any], tmp_path: Path
):
    """A NaN in the first shard ends the run although the second one, on which other workers wait,
    never comes.
    """
    files = checkpoint()
    tensors = {"model.layers.1.mlp.up_proj.weight": torch.full((512, 128), float("nan")).bfloat16()}
    files["model-00001-of-00006.safetensors"] = save(tensors)
    weight_map = json.loads(files["model.safetensors.index.json"])["weight_map"]
    kept = {name: file for name, file in weight_map.items() if "00001" not in file}
    kept |= dict.fromkeys(tensors, "model-00001-of-00006.safetensors")
    files["model.safetensors.index.json"] = json.dumps({"weight_map": kept}).encode()
    publish(hub, files)
    is_over = threading.Event()
    started = time.monotonic()
    with (
        after_the_headers(hub, Fault(SECOND, times=99, call=lambda: is_over.wait(120))),
        pytest.raises(SourceError, match="NaN or inf"),
    ):
        stream(tmp_path / "out", where, workers=3)
    assert time.monotonic() - started < 60
    # the transfer that was left alone ends now, and asks the Hub of no other test
    is_over.set()
    while "nf4conv-fetch" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() - started < 200
        time.sleep(0.02)


def test_pickles_are_not_streamed(hub: Hub, where: dict[str, Any], tmp_path: Path):
    torch.save({"a.weight": torch.ones(64, 64)}, tmp_path / "x.bin")
    publish(hub, {"config.json": CONFIG, "pytorch_model.bin": (tmp_path / "x.bin").read_bytes()})
    with pytest.raises(SourceError, match="only safetensors can be streamed; run without --stream"):
        nf4conv.plan_quantize(REPO, **OPTIONS, **where)


@pytest.mark.parametrize("kind", ["packed", "kept"])
def test_verify_looks_again_at_what_was_streamed(hub, tmp_path, where, kind):
    publish(hub, checkpoint())
    out = tmp_path / "out"
    run = {"device": "cpu", "workers": 2, "verify": True}
    first = nf4conv.quantize(REPO, out, **OPTIONS, **run, **where)
    again = nf4conv.quantize(REPO, out, **OPTIONS, **run, **where)
    assert again.already_complete
    assert again.verification is not None
    assert first.verification is not None
    assert again.verification == first.verification

    shard = max(out.glob("*.safetensors"))
    wanted = "norm1.weight" if kind == "kept" else "up_proj.weight"
    found = next(tensor for tensor in read_header(shard) if tensor.name.endswith(wanted))
    content = bytearray(shard.read_bytes())
    content[found.start + 8] ^= 1
    shard.write_bytes(content)
    with pytest.raises(VerificationError, match=f"verification failed: .*{wanted}"):
        nf4conv.quantize(REPO, out, **OPTIONS, **run, **where)
