"""Diffusers pipelines: what is packed, what stays, and that the whole is finished last."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from hub_server import Hub, Repo
from safetensors.torch import load_file, save_file

import nf4conv
from nf4conv.errors import OutputError, PlanError, SourceError
from nf4conv.options import SourceOptions
from nf4conv.sources.diffusers import is_packed_by_default, open_diffusers

RUN = {"device": "cpu", "workers": 2}
FLUX = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.42.1", "num_layers": 1}
CLIP = {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"], "dtype": "bfloat16"}
VAE = {"_class_name": "AutoencoderKL", "latent_channels": 1}
INDEX = {
    "_class_name": "FluxPipeline",
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "vae": ["diffusers", "AutoencoderKL"],
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "safety_checker": [None, None],
}
WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
}
PACKED = {
    "transformer/transformer_blocks.0.attn.to_q.weight",
    "transformer/single_transformer_blocks.0.proj_mlp.weight",
    "text_encoder/encoder.layers.0.mlp.fc1.weight",
}


def component(folder: Path, stem: str, config: dict, **shapes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(len(shapes))
    folder.mkdir(parents=True)
    tensors = {
        name.replace("__", "."): torch.randn(shape, generator=generator).bfloat16()
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / f"{stem}.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Saves a tiny FluxPipeline with save_pretrained, and adds files that are no part of it."""
    folder = tmp_path / "pipeline"
    component(
        folder / "transformer",
        "diffusion_pytorch_model",
        FLUX,
        x_embedder__weight=(64, 4),
        transformer_blocks__0__attn__to_q__weight=(64, 64),
        transformer_blocks__0__attn__to_q__bias=(64,),
        single_transformer_blocks__0__proj_mlp__weight=(256, 64),
    )
    component(
        folder / "text_encoder",
        "model",
        CLIP,
        embeddings__token_embedding__weight=(64, 32),
        encoder__layers__0__mlp__fc1__weight=(64, 32),
    )
    component(
        folder / "vae",
        "diffusion_pytorch_model",
        VAE,
        decoder__mid_block__attentions__0__to_q__weight=(64, 64),
    )
    (folder / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"the same in another format")
    for name in (
        "scheduler/scheduler_config.json",
        "tokenizer/vocab.json",
        "other/config.json",
        "onnx/model.onnx",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    (folder / "flux1-dev.safetensors").write_bytes(b"all of it in the format of its authors")
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    return folder


def quantize(source: object, out: Path, **options: Any) -> nf4conv.RunReport:
    return nf4conv.quantize(source, out, **{**RUN, **options})


def dequantize(source: object, out: Path, **options: Any) -> nf4conv.RunReport:
    return nf4conv.dequantize(source, out, **{**RUN, **options})


def packed(plan) -> set[str]:
    return {row.name for row in plan.rows() if row.action == "pack"}


def test_layout_and_contents(pipeline, tmp_path):
    out = tmp_path / "out"
    report = quantize(pipeline, out)
    found = contents(out)
    assert set(found) == {
        "model_index.json",
        "README.md",
        *(f"{name}/config.json" for name in WEIGHTS),
        *(f"{name}/nf4conv.json" for name in WEIGHTS),
        *(f"{name}/{file}" for name, file in WEIGHTS.items()),
        *("scheduler/scheduler_config.json", "tokenizer/vocab.json"),
    }
    assert found["model_index.json"] == (pipeline / "model_index.json").read_bytes()
    assert (report.totals.packed, report.totals.copied, report.out) == (3, 4, str(out))
    assert report.totals.bytes_after == sum(
        path.stat().st_size for path in out.rglob("*.safetensors")
    )
    before = load_file(pipeline / "vae/diffusion_pytorch_model.safetensors")
    after = load_file(out / "vae/diffusion_pytorch_model.safetensors")
    assert {name: tensor.tolist() for name, tensor in before.items()} == {
        name: tensor.tolist() for name, tensor in after.items()
    }
    assert json.loads(found["vae/config.json"]) == VAE


def recorded(folder: Path, submodel: str) -> list[tuple[str, str, int]]:
    groups = json.loads((folder / submodel / "nf4conv.json").read_bytes())["weights"]
    return [(group["origin"], group["scales"], group["count"]) for group in groups]


def test_a_search_is_of_the_components_in_16_bits(pipeline, tmp_path):
    """A text encoder in 4 bits stays as it is, and is not said to be searched."""
    quantized, mixed, out = (tmp_path / name for name in ("quantized", "mixed", "out"))
    quantize(pipeline, quantized)
    shutil.copytree(pipeline, mixed)
    shutil.rmtree(mixed / "text_encoder")
    shutil.copytree(quantized / "text_encoder", mixed / "text_encoder")
    search = {"scales": "search"}
    report = quantize(mixed, out, **search)
    assert report.totals.stay == 1
    assert any("text_encoder: 1 weights keep scales" in note for note in report.notes)
    assert recorded(out, "text_encoder") == [("kept as found", "absmax", 1)]
    assert recorded(out, "transformer") == [("packed", "search", 2)]
    assert recorded(out, "vae") == []
    card = (out / "README.md").read_text()
    assert "| scales | searched (2 weights), absmax (1 weights) |" in card
    for source in (None, mixed):
        assert nf4conv.verify(out, source=source, exact=bool(source), **RUN).passed
    with pytest.raises(PlanError, match="--scales search needs the 16-bit model"):
        nf4conv.plan_quantize(quantized, **search)


def test_each_component_has_a_config_of_its_own(pipeline, tmp_path):
    quantize(pipeline, tmp_path / "out")
    configs = {
        name: json.loads((tmp_path / "out" / name / "config.json").read_bytes())
        for name in INDEX
        if name in ("transformer", "text_encoder")
    }
    quantization = {name: config.pop("quantization_config") for name, config in configs.items()}
    # diffusers warns of every key that it does not know, dtype among them
    assert configs["transformer"] == FLUX
    assert configs["text_encoder"] == CLIP | {"torch_dtype": "bfloat16"}
    assert "x_embedder" in quantization["transformer"]["llm_int8_skip_modules"]
    assert "x_embedder" not in quantization["text_encoder"]["llm_int8_skip_modules"]


OF_TRANSFORMER = {name for name in PACKED if name.startswith("transformer/")}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"include": ("transformer/*",)}, OF_TRANSFORMER),
        ({"include": ("*.attn.*",)}, {name for name in PACKED if ".attn." in name}),
        ({"exclude": ("text_*/*",)}, OF_TRANSFORMER),
        ({"exclude": ("transformer/*proj_mlp*",)}, {one for one in PACKED if "proj" not in one}),
        ({"exclude": ("text_encoder/*proj_mlp*",)}, PACKED),
    ],
    # sets are spelled in another order in each process, and xdist compares names
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_choosing(pipeline, options, expected):
    assert packed(nf4conv.plan_quantize(pipeline, **options).made) == expected


@pytest.mark.parametrize("name", ["encoder-Q4_0.gguf", "model.onnx", "flax_model.msgpack"])
def test_weights_of_other_programs_are_not_left_out_unsaid(pipeline, name):
    [weights] = (pipeline / "text_encoder").glob("*.safetensors")
    weights.rename(weights.with_name(name))
    with pytest.raises(SourceError, match=r"text_encoder: .* without weights in safetensors"):
        nf4conv.plan_quantize(pipeline)


def test_a_model_whose_weights_are_lost_is_refused(pipeline: Path):
    """The result would lack them; a processor may have a config and no weights."""
    vae = pipeline / "vae"
    for path in vae.glob("*.bin"):
        path.unlink()
    [weights] = vae.glob("*.safetensors")
    index = vae / "diffusion_pytorch_model.safetensors.index.json"
    content = {"metadata": {}, "weight_map": {"decoder": weights.name}}
    index.write_text(json.dumps(content))
    weights.unlink()
    message = f"{vae}: AutoencoderKL without weights"
    with pytest.raises(SourceError, match=re.escape(message)):
        nf4conv.plan_quantize(pipeline)
    parts = json.loads((pipeline / "model_index.json").read_text())
    parts["vae"] = ["diffusers", "VaeImageProcessor"]
    (pipeline / "model_index.json").write_text(json.dumps(parts))
    nf4conv.plan_quantize(pipeline)


def test_choosing_nothing_is_refused(pipeline, tmp_path):
    with pytest.raises(PlanError, match="no tensor of this checkpoint would be packed"):
        quantize(pipeline, tmp_path / "out", include=("vae/*",))


def test_packed_and_kept_by_default():
    packed = "transformer transformer_2 unconditional_transformer unet prior controlnet"
    assert all(map(is_packed_by_default, [*packed.split(), "text_encoder_3"]))
    kept = "vae image_encoder safety_checker vqvae text_encoder_x"
    assert not any(map(is_packed_by_default, kept.split()))


def test_a_component_alone_gives_the_same_weights(pipeline, tmp_path):
    quantize(pipeline, tmp_path / "all")
    quantize(pipeline, tmp_path / "one", subfolder="transformer")
    one, whole = contents(tmp_path / "one"), contents(tmp_path / "all" / "transformer")
    del one["README.md"]
    assert one == whole


@pytest.mark.parametrize("after", ["text_encoder", "vae"])
def test_resuming_keeps_finished_components(pipeline, tmp_path, after):
    quantize(pipeline, tmp_path / "whole")
    out = tmp_path / "out"

    def stop(_count: int) -> None:
        if (out / after).is_dir():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(pipeline, out, progress=stop)
    assert not (out / "model_index.json").exists()
    kept = out / "transformer" / WEIGHTS["transformer"]
    before = kept.stat()
    with pytest.raises(OutputError, match="blocksize was not given and is 128 now"):
        quantize(pipeline, out, blocksize=128)
    seen: list[int] = []
    report = quantize(pipeline, out, progress=seen.append)
    assert kept.stat().st_mtime_ns == before.st_mtime_ns
    assert report.shards_resumed == ["text_encoder", "vae"].index(after) + 1
    assert (report.totals.packed, sum(seen)) == (
        3,
        nf4conv.plan_quantize(pipeline).totals.bytes_before,
    )
    assert contents(out) == contents(tmp_path / "whole")


def test_another_pipeline_is_not_overwritten_unasked(pipeline, tmp_path):
    out = tmp_path / "out"
    quantize(pipeline, out)
    whole = contents(out)
    (out / ".nf4conv").mkdir()  # as a run leaves it that is killed before its last removal
    (out / ".nf4conv/lock").touch()
    assert quantize(pipeline, out).already_complete
    assert contents(out) == whole
    with pytest.raises(OutputError, match="blocksize was not given and is 128 now"):
        quantize(pipeline, out, blocksize=128)
    assert contents(out) == whole
    quantize(pipeline, out, blocksize=128, overwrite=True)
    assert contents(out) != whole


def test_there_and_back(pipeline, tmp_path):
    quantize(pipeline, tmp_path / "out")
    report = dequantize(tmp_path / "out", tmp_path / "back")
    assert report.totals.decoded == 3
    for name in ("transformer", "text_encoder", "vae"):
        [before], [after] = (
            [*(root / name).glob("*.safetensors")] for root in (pipeline, tmp_path / "back")
        )
        shapes = [
            {key: (t.shape, t.dtype) for key, t in load_file(file).items()}
            for file in (before, after)
        ]
        assert shapes[0] == shapes[1]
        assert "quantization_config" not in json.loads((after.parent / "config.json").read_bytes())
    assert json.loads((tmp_path / "back/transformer/config.json").read_bytes()) == FLUX


def test_verification(pipeline, tmp_path):
    out = tmp_path / "out"
    quantize(pipeline, out)
    found = nf4conv.verify(out, source=pipeline, exact=True)
    assert found.passed
    assert found.identical
    assert {row.name for row in found.weights} == PACKED
    file = out / "vae/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    found = nf4conv.verify(out, source=pipeline)
    assert [(finding.check, finding.file) for finding in found.findings] == [
        ("copies", "vae/" + file.name)
    ]
    assert not found.passed
    assert nf4conv.verify(out).passed  # the change is not one that the pipeline itself tells


def test_verification_of_what_was_decoded(quantized, tmp_path):
    out = tmp_path / "decoded"
    dequantize(quantized, out)
    exact = {"exact": True}
    report = nf4conv.verify(out, source=quantized, **exact, **RUN)
    assert report.passed
    assert report.relation == "decoded"
    assert report.identical
    assert sum(row.parameters for row in report.tensors) == report.parameters
    assert nf4conv.verify(out, **RUN).passed
    for submodel in ("transformer", "vae"):
        [file] = (out / submodel).glob("*.safetensors")
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        [fault] = nf4conv.verify(out, source=quantized, **exact, **RUN).findings
        assert (fault.check, fault.file) == ("copies", f"{submodel}/{file.name}")
        file.write_bytes(content)
    with pytest.raises(SourceError):
        nf4conv.verify(out, source=quantized / "transformer", **RUN)


@pytest.fixture
def quantized(pipeline, tmp_path) -> Path:
    quantize(pipeline, tmp_path / "out")
    return tmp_path / "out"


def test_two_pipelines_in_16_bits(pipeline, tmp_path):
    copy = Path(shutil.copytree(pipeline, tmp_path / "copy"))
    same = nf4conv.verify(copy, source=pipeline, exact=True, **RUN)
    assert (same.exit_code, same.relation) == (0, "none")
    assert len(same.tensors) == 7
    assert same.identical
    with pytest.raises(PlanError, match="nothing to verify"):
        nf4conv.verify(copy, **RUN)
    file = copy / "vae/diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    for tolerance, code in ((None, 2), (1.0, 0), (1e-9, 1)):
        found = nf4conv.verify(copy, source=pipeline, tolerance=tolerance, **RUN)
        assert found.exit_code == code
        [finding] = found.findings
        assert (finding.check, finding.file) == ("values", f"vae/{file.name}")


def test_inspection(pipeline, tmp_path):
    quantize(pipeline, tmp_path / "out")
    found = nf4conv.inspect(tmp_path / "out")
    assert {row.name for row in found.tensors if row.format} == PACKED
    assert found.totals.packed == 3
    assert "vae/diffusion_pytorch_model.safetensors" in found.files


def test_a_missing_component(pipeline):
    (pipeline / "scheduler/scheduler_config.json").unlink()
    with pytest.raises(SourceError, match=r"model_index.json: scheduler: there is no such folder"):
        nf4conv.plan_quantize(pipeline)


@pytest.mark.parametrize("stream", [False, True], ids=["fetched", "streamed"])
def test_of_the_hub_only_what_is_needed_is_fetched(hub: Hub, tmp_path, pipeline, stream):
    files = {
        path.relative_to(pipeline).as_posix(): path.read_bytes()
        for path in pipeline.rglob("*")
        if path.is_file()
    }
    fp16 = "transformer/diffusion_pytorch_model.fp16.safetensors"
    hub.repos["org/model"] = Repo()
    hub.repos["org/model"].commit(
        files | {fp16: files["transformer/diffusion_pytorch_model.safetensors"]}
    )
    where = {"cache_dir": tmp_path / "cache", "stream": stream}
    quantize("org/model", tmp_path / "out", **where)
    quantize(pipeline, tmp_path / "local")
    from_hub, from_disk = contents(tmp_path / "out"), contents(tmp_path / "local")
    for name in [name for name in from_hub if name.endswith(("README.md", "nf4conv.json"))]:
        assert from_hub.pop(name) != from_disk.pop(name)  # which names the source
    assert from_hub == from_disk
    cached = {
        path.relative_to(path.parents[1]).as_posix()
        for path in (tmp_path / "cache").rglob("*.safetensors")
    }
    assert cached == (
        set()
        if stream
        else {name for name in files if "/" in name and name.endswith(".safetensors")}
    )
    assert not list((tmp_path / "cache").rglob("*.bin"))
    assert not list((tmp_path / "cache").rglob("*.onnx"))
    variant = SourceOptions(cache_dir=tmp_path / "cache", variant="fp16")
    opened = open_diffusers("org/model", variant).submodels
    assert {name: place.variant for name, place in opened.items()} == {
        "transformer": "fp16", "text_encoder": None, "vae": None}  # fmt: skip
