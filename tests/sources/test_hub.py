"""Sources on the Hub, by huggingface_hub's real client, from a server on the loopback device."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
import torch
from checkpoints import contents, write_source
from hub_server import Fault, Hub, Repo
from safetensors.torch import save

import nf4conv
from nf4conv.errors import SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.files import split_names
from nf4conv.sources.opening import open_source
from nf4conv.sources.source import Source

REPO = "some-org/Some-Model_1.0"
NEEDED = {
    "config.json",
    "tokenizer.json",
    "README.md",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}
NOT_NEEDED = {
    "original/consolidated.00.pth": b"x" * 5000,
    "consolidated.safetensors": b"x" * 5000,
    "pytorch_model-00001-of-00002.bin": b"x" * 5000,
    "pytorch_model.bin.index.json": b"{}",
    "model-Q4_K_M.gguf": b"x" * 5000,
    "onnx/model.onnx": b"x" * 5000,
    ".gitattributes": b"*.safetensors filter=lfs",
    "params.json": b"{}",
}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """The files of a checkpoint, and what repositories hold beside it."""
    card = b"---\nlicense: apache-2.0\n---\n# Some model\n"
    return contents(write_source(tmp_path / "published")) | NOT_NEEDED | {"README.md": card}


@pytest.fixture
def where(tmp_path: Path) -> SourceOptions:
    return SourceOptions(cache_dir=tmp_path / "cache")


def publish(hub: Hub, files: dict[str, bytes], **attributes: Any) -> Repo:
    hub.repos[REPO] = Repo(**attributes)
    hub.repos[REPO].commit(files)
    return hub.repos[REPO]


def fetched_names(source: Source) -> set[str]:
    return set(contents(source.folder))


def test_only_what_is_needed_is_fetched(hub: Hub, files: dict[str, bytes], where: SourceOptions):
    repo = publish(hub, files)
    source = open_source(REPO, where)
    assert fetched_names(source) == NEEDED
    assert str(source.fetched.origin) == f"{REPO}@{repo.head}"
    for name in NOT_NEEDED:
        assert hub.count(f"/resolve/.*/{name}$") == 0


def test_the_result_is_that_of_the_folder(
    hub: Hub, files: dict[str, bytes], where: SourceOptions, tmp_path: Path
):
    publish(hub, files)
    run = {"device": "cpu", "workers": 2, "max_shard_size": 60_000}
    nf4conv.quantize(REPO, tmp_path / "from-hub", **run, cache_dir=where.cache_dir)
    nf4conv.quantize(tmp_path / "published", tmp_path / "from-disk", **run)
    from_hub, from_disk = contents(tmp_path / "from-hub"), contents(tmp_path / "from-disk")
    for name in ("README.md", "nf4conv.json"):
        assert from_hub.pop(name) != from_disk.pop(name)  # it names the source
    assert from_hub == from_disk


def test_a_cached_snapshot_is_used_in_place(
    hub: Hub, files: dict[str, bytes], where: SourceOptions
):
    publish(hub, files)
    folder = open_source(REPO, where).folder
    hub.requests.clear()
    assert open_source(REPO, where).folder == folder
    assert hub.count("resolve|cdn") == 0, "a file was asked for again"
    assert len(hub.requests) <= 3


@pytest.mark.parametrize("offline", ["--local-files-only", "HF_HUB_OFFLINE"])
def test_offline_nobody_is_asked(
    hub: Hub,
    files: dict[str, bytes],
    where: SourceOptions,
    offline: str,
    monkeypatch: pytest.MonkeyPatch,
):
    publish(hub, files)
    online = open_source(REPO, where)
    hub.requests.clear()
    hub.repos.clear()
    if offline == "HF_HUB_OFFLINE":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    else:
        where = SourceOptions(cache_dir=where.cache_dir, local_files_only=True)
    cached = open_source(REPO, where)
    assert cached.tensors == online.tensors
    assert cached.fetched.origin == online.fetched.origin
    assert hub.requests == []


def test_offline_and_not_cached(hub: Hub, where: SourceOptions, monkeypatch: pytest.MonkeyPatch):
    asked = r"1\.0: not in the cache; run once without {}, to download it"
    with pytest.raises(SourceError, match=asked.format("--local-files-only")):
        open_source(REPO, SourceOptions(cache_dir=where.cache_dir, local_files_only=True))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=asked.format("HF_HUB_OFFLINE")):
        open_source(REPO, where)
    assert hub.requests == []


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "README.md"])
def test_offline_a_file_that_has_lost_its_content_is_refused(
    hub: Hub, files: dict[str, bytes], where: SourceOptions, name: str
):
    """Its blob was removed; the result would be without it, and look finished."""
    publish(hub, files)
    path = open_source(REPO, where).folder / name
    path.resolve().unlink()
    offline = SourceOptions(cache_dir=where.cache_dir, local_files_only=True)
    lost = rf"{name}: its content is not in the cache any more; run once without --local-files-only"
    with pytest.raises(SourceError, match=lost):
        open_source(REPO, offline)
    open_source(REPO, where)
    assert path.read_bytes() == files[name]
    path.with_name("model.onnx").symlink_to("nowhere")  # which is not needed
    open_source(REPO, offline)


def test_an_interrupted_download_is_not_taken_for_a_cached_one(
    hub: Hub, files: dict[str, bytes], where: SourceOptions, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts
    publish(hub, files)
    hub.faults = [Fault("GET /cdn/.*00002-of-00002", times=99, cut=1000)]
    with pytest.raises(SourceError):
        open_source(REPO, where)
    with pytest.raises(
        SourceError, match=r"names model-00002-of-00002\.safetensors, which the cache lacks"
    ):
        open_source(REPO, SourceOptions(cache_dir=where.cache_dir, local_files_only=True))
    hub.faults.clear()
    assert fetched_names(open_source(REPO, where)) == NEEDED


def test_a_revision_is_resolved_once(hub: Hub, files: dict[str, bytes], where: SourceOptions):
    """A push during the run changes nothing: whatever is fetched after the first request is of the
    first commit.
    """
    repo = publish(hub, files)
    first = repo.head
    hub.faults = [
        Fault(
            r"GET /cdn/.*00001-of",
            call=lambda: repo.commit(files | {"tokenizer.json": b"new"}) and None,
        )
    ]
    source = open_source(REPO, where)
    assert source.fetched.origin.commit == first != repo.head
    assert (source.folder / "tokenizer.json").read_bytes() == files["tokenizer.json"]


def test_a_push_between_the_first_requests_is_noticed(
    hub: Hub, files: dict[str, bytes], where: SourceOptions
):
    repo = publish(hub, files)
    hub.faults = [
        Fault(rf"GET /api/models/{REPO}$", times=0),
        Fault(
            rf"GET /api/models/{REPO}/revision/main",
            call=lambda: repo.commit(files | {"new": b""}) and None,
        ),
    ]
    with pytest.raises(SourceError, match="changed while it was being read; run again"):
        open_source(REPO, where)


LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


@pytest.mark.parametrize(
    ("attributes", "options", "explanation"),
    [
        (
            {"token": "hf_owner"},
            {},
            f"Repository Not Found .*private or gated repo.*; if the name is right, {LOG_IN}",
        ),
        ({"token": "hf_owner"}, {"token": "hf_else"}, "Repository Not Found .*"),
        (
            {"token": "hf_owner", "gated": True},
            {"token": "hf_else"},
            f"Cannot access gated repo .* Access to model {REPO} is restricted. Visit the page to "
            f"ask for access.*; accept the conditions at http://[\\w.:]+/{REPO}, and {LOG_IN}",
        ),
        ({}, {"revision": "never"}, "Revision Not Found .* Invalid rev id: never"),
    ],
    ids=["private", "wrong-token", "gated", "revision"],
)
def test_the_hubs_own_explanation_and_what_to_do(
    hub: Hub,
    files: dict[str, bytes],
    where: SourceOptions,
    attributes: dict[str, Any],
    options: dict[str, Any],
    explanation: str,
):
    publish(hub, files, **attributes)
    with pytest.raises(SourceError) as refused:
        open_source(REPO, SourceOptions(cache_dir=where.cache_dir, **options))
    assert re.fullmatch(rf"{REPO}: .*{explanation}", str(refused.value)), refused.value
    assert "Request ID" not in str(refused.value)
    assert len(hub.requests) <= 8


def test_the_token_is_sent_and_shown_nowhere(
    hub: Hub, files: dict[str, bytes], where: SourceOptions
):
    publish(hub, files, token="hf_owner", gated=True)
    options = SourceOptions(cache_dir=where.cache_dir, token="hf_owner")
    source = open_source(REPO, options)
    assert fetched_names(source) == NEEDED
    tokens = {(request.token, "/cdn/" in request.line) for request in hub.requests}
    assert tokens == {("hf_owner", False), (None, True)}, "storage elsewhere is not told the token"
    assert "hf_owner" not in repr(options) + repr(source)


@pytest.mark.parametrize(
    "name", ["../up", "a/b/c", "org/", "no-slash", "org/na me", "org/..", "-x/y"]
)
def test_what_cannot_be_a_repository_is_a_missing_path(hub: Hub, name: str):
    with pytest.raises(SourceError, match="no such file or folder"):
        open_source(name)
    assert hub.requests == []


def test_a_path_that_exists_wins(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "some-org").mkdir()
    write_source(tmp_path / REPO)
    monkeypatch.chdir(tmp_path)
    assert open_source(REPO).folder == Path(REPO)
    assert hub.requests == []


# --- what is in a repository ----------------------------------------------------------------------


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.layers.0.mlp.up_proj.weight": torch.randn(96, 64, generator=generator).bfloat16()
    }


CONFIG = json.dumps(
    {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
).encode()


def test_pickles_where_there_are_no_safetensors(hub: Hub, where: SourceOptions, tmp_path: Path):
    torch.save(weights(), tmp_path / "x.bin")
    pickled = (tmp_path / "x.bin").read_bytes()
    publish(hub, {"pytorch_model.bin": pickled, "config.json": CONFIG, "training_args.bin": b"x"})
    source = open_source(REPO, where)
    assert [file.name for file in source.files] == ["pytorch_model.bin"]
    assert fetched_names(source) == {"pytorch_model.bin", "config.json"}


def test_variant(hub: Hub, where: SourceOptions):
    publish(
        hub,
        {
            "model.safetensors": save(weights(0)),
            "model.fp16.safetensors": save(weights(1)),
            "config.json": CONFIG,
        },
    )
    source = open_source(REPO, SourceOptions(cache_dir=where.cache_dir, variant="fp16"))
    assert fetched_names(source) == {"model.fp16.safetensors", "config.json"}
    assert source.stem == "model"
    with pytest.raises(SourceError, match="of the variant int3 in it"):
        open_source(REPO, SourceOptions(cache_dir=where.cache_dir, variant="int3"))


@pytest.mark.parametrize(
    "index", ["{}.safetensors.index.fp16.json", "{}.safetensors.fp16.index.json"]
)
@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_sharded_variants_in_both_spellings(tmp_path: Path, stem: str, index: str):
    folder = tmp_path / "source"
    folder.mkdir()
    weight_map = {}
    for number in (1, 2):
        name = f"{stem}.fp16-0000{number}-of-00002.safetensors"
        (folder / name).write_bytes(save({f"blocks.{number}.weight": torch.ones(64, 64)}))
        weight_map[f"blocks.{number}.weight"] = name
    (folder / index.format(stem)).write_text(json.dumps({"weight_map": weight_map}))
    (folder / f"{stem}.safetensors").write_bytes(save({"other": torch.ones(1)}))
    source = open_source(folder, SourceOptions(variant="fp16"))
    assert [tensor.name for tensor in source.tensors] == ["blocks.1.weight", "blocks.2.weight"]
    assert source.stem == stem


def test_subfolder(hub: Hub, where: SourceOptions):
    pipeline = {
        "model_index.json": b"{}",
        "transformer/config.json": json.dumps({"_class_name": "FluxTransformer2DModel"}).encode(),
        "transformer/diffusion_pytorch_model.safetensors": save(
            {"blocks.0.ff.weight": torch.ones(64, 64)}
        ),
        "vae/diffusion_pytorch_model.safetensors": save({"conv": torch.ones(3, 3)}),
    }
    repo = publish(hub, pipeline)
    options = SourceOptions(cache_dir=where.cache_dir, subfolder="transformer")
    source = open_source(REPO, options)
    assert fetched_names(source) == {"config.json", "diffusion_pytorch_model.safetensors"}
    assert str(source.fetched.origin) == f"{REPO}/transformer@{repo.head}"
    assert source.stem == "diffusion_pytorch_model"
    offline = SourceOptions(
        cache_dir=where.cache_dir, subfolder="transformer", local_files_only=True
    )
    assert open_source(REPO, offline).fetched.origin == source.fetched.origin
    with pytest.raises(
        SourceError, match=r"a diffusers pipeline, .* one by one: --subfolder transformer"
    ):
        open_source(REPO, where)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-9.safetensors"}, r"index\.json names model-9\.safetensors, which .* lacks"),
        ({"a": "../../../../etc/passwd"}, "is outside the folder"),
        (5, "has no weight_map"),
    ],
)
def test_an_index_that_is_wrong(
    hub: Hub, files: dict[str, bytes], where: SourceOptions, weight_map: object, message: str
):
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    publish(hub, files)
    with pytest.raises(SourceError, match=message):
        open_source(REPO, where)
    assert hub.count("GET /cdn.*safetensors$") == 0


def test_importing_and_planning_locally_does_without_huggingface_hub(source: Path):
    code = (
        "import sys, nf4conv\n"
        "nf4conv.plan_quantize(sys.argv[1])\n"
        "assert 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(source)], check=True)
    nf4conv.plan_quantize(source)


def test_of_a_split_gguf_only_its_own_files_are_needed():
    names = [f"q/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert split_names(names[0]) == split_names(names[1]) == names
    assert split_names("q/m.gguf") == ["q/m.gguf"]
