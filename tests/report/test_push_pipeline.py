"""A pipeline's card, and pushing it: one commit of all components, which go up while later ones are
made.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import contents, pushed
from hub_server import Hub, Repo
from safetensors.torch import save_file

import nf4conv
from nf4conv.report.results import RunReport

CPU = {"device": "cpu"}
REPO = "me/flux-nf4"
PUSH = {"push_to_hub": REPO, "token": "hf_writer"}
CARD = b"---\nlicense: other\nlicense_name: flux\ntags: [text-to-image]\n---\n# Flux\n"
COMPONENTS = {
    "transformer": (
        {"_class_name": "FluxTransformer2DModel"},
        "diffusion_pytorch_model",
        "transformer_blocks.0.to_q",
    ),
    "text_encoder": (
        {"model_type": "clip_text_model", "dtype": "bfloat16"},
        "model",
        "encoder.layers.0.fc1",
    ),
    "vae": ({"_class_name": "AutoencoderKL"}, "diffusion_pytorch_model", "decoder.to_q"),
}


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    folder = tmp_path / "pipeline"
    for number, (name, (config, stem, module)) in enumerate(COMPONENTS.items()):
        (folder / name).mkdir(parents=True)
        generator = torch.Generator().manual_seed(number)
        weight = torch.randn(256, 64, generator=generator).bfloat16()
        save_file({f"{module}.weight": weight}, folder / name / f"{stem}.safetensors")
        (folder / name / "config.json").write_text(json.dumps(config))
    # the first component is one of which nothing is packed, as image_encoder of Wan
    index = {
        "_class_name": "FluxPipeline",
        **{name: ["library", "Class"] for name in reversed(COMPONENTS)},
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "README.md").write_bytes(CARD)
    return folder


def convert(source: Any, out: Path, push: dict[str, Any] = PUSH, **settings: Any) -> RunReport:
    where = {"cache_dir": out.parent / "cache"}
    run = {"device": "cpu", "workers": 2, **settings}
    return nf4conv.quantize(source, out, **run, **where, **push)


def pushed_files(hub: Hub) -> dict[str, bytes]:
    return {
        name: content for name, content in hub.repos[REPO].files.items() if name != ".gitattributes"
    }


def test_what_is_pushed_is_the_folder(hub: Hub, pipeline: Path, tmp_path: Path):
    report = convert(pipeline, tmp_path / "out")
    assert pushed_files(hub) == pushed(tmp_path / "out", REPO)
    assert {
        "README.md",
        "model_index.json",
        "vae/diffusion_pytorch_model.safetensors",
    } < pushed_files(hub).keys()
    assert report.pushed == f"{hub.url}/{REPO}/commit/{hub.repos[REPO].head}"
    assert len(hub.repos[REPO].commits) == 2, "the empty repository, and the pipeline"


def test_the_card(hub: Hub, pipeline: Path, tmp_path: Path):
    hub.repos["org/flux"] = Repo()
    commit = hub.repos["org/flux"].commit(contents(pipeline))
    report = convert("org/flux", tmp_path / "out", {}, verify=True)
    _, front, body = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "base_model": "org/flux",
        "base_model_relation": "quantized",
        "license": "other",
        "license_name": "flux",
        "library_name": "diffusers",
        "tags": ["text-to-image", "bitsandbytes", "4-bit", "nf4", "nf4conv"],
    }
    assert f"https://huggingface.co/org/flux/tree/{commit}" in body
    assert "from diffusers import FluxPipeline" in body
    assert "torch_dtype=torch.bfloat16" in body
    assert "| what is not packed | bfloat16 |" in body
    assert "| packed | 2 weights, 66.7 % of 49,152 parameters |" in body
    assert f"{8 * report.totals.bytes_after / 49152:.2f} bits a parameter" in body
    assert report.verification is not None
    assert (report.verification.packed, report.verification.copied) == (2, 1)
    assert f"relative error at most {report.verification.largest_relative_error:.4f}" in body


class Interruption:
    """Progress that is interrupted when the second component has been read."""

    def __init__(self) -> None:
        self.read = 0

    def __call__(self, count: int) -> None:
        self.read += count
        if self.read > 32768:
            raise KeyboardInterrupt


def test_an_interrupted_run_pushes_nothing_and_the_next_one_everything(
    hub: Hub, pipeline: Path, tmp_path: Path
):
    whole = contents(pipeline)
    convert(pipeline, tmp_path / "expected")
    del hub.repos[REPO]
    with pytest.raises(KeyboardInterrupt):
        nf4conv.quantize(pipeline, tmp_path / "out", **CPU, progress=Interruption(), **PUSH)
    assert pushed_files(hub) == {}
    assert not (tmp_path / "out" / "model_index.json").exists()
    assert contents(pipeline) == whole
    report = nf4conv.quantize(pipeline, tmp_path / "out", **CPU, **PUSH)
    assert report.shards_resumed
    assert pushed_files(hub) == pushed(tmp_path / "out", REPO)
    assert contents(tmp_path / "out") == contents(tmp_path / "expected")


def test_what_would_mislead_beside_the_new_weights_is_deleted(
    hub: Hub, pipeline: Path, tmp_path: Path
):
    convert(pipeline, tmp_path / "out")
    hub.repos[REPO].commit({**pushed_files(hub), "vae/SHA256SUMS": b"of other weights"})
    convert(pipeline, tmp_path / "out", overwrite=True)
    assert pushed_files(hub) == pushed(tmp_path / "out", REPO)
