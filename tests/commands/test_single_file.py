"""`--single-file`: what ComfyUI's and Forge's loaders of NF4 do with the keys of a file, done to
ours.

Both read a linear layer P so: if any key that begins with "P.weight." names bitsandbytes, P.weight
is the packed codes and those keys, without the prefix, are the quant state; if none does, P.weight
is the weight. Which model a file is they tell by the shapes of layers outside the blocks
(ComfyUI_bitsandbytes_NF4, stable-diffusion-webui-forge, huggingface_guess).
"""

import json
import os
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nf4conv.cli import main
from nf4conv.codec.ops import dequantize_4bit as decode
from nf4conv.codec.ops import quantize_4bit
from nf4conv.commands.inspect import inspect_checkpoint
from nf4conv.commands.quantize import plan_quantization, quantize_checkpoint
from nf4conv.commands.quantizing import single_file
from nf4conv.commands.verify import verify_checkpoint
from nf4conv.errors import Nf4convError, OutputError, PlanError, VerificationError
from nf4conv.options import (
    PushOptions,
    QuantizeOptions,
    RunOptions,
    SourceOptions,
    VerifyOptions,
)

pytestmark = pytest.mark.oracle
CPU = RunOptions(device="cpu")
ONE = QuantizeOptions(single_file=True)
BUNDLED = "model.diffusion_model."
FLUX = {
    "double_blocks.0.img_attn.qkv": (192, 64), "double_blocks.0.txt_mlp.0": (256, 64),
    "double_blocks.0.img_mod.lin": (384, 64), "single_blocks.1.linear1": (448, 64),
    "single_blocks.1.linear2": (64, 320),
}  # fmt: skip
UNET = {
    "input_blocks.4.1.transformer_blocks.0.attn1.to_k": (64, 64),
    "input_blocks.4.1.transformer_blocks.0.attn2.to_v": (64, 128),
    "middle_block.1.transformer_blocks.1.attn2.to_k": (64, 128),
    "output_blocks.3.1.transformer_blocks.0.ff.net.0.proj": (512, 64),
}
TELLING = {
    "flux": {
        "img_in": (64, 64),
        "txt_in": (64, 128),
        "vector_in.in_layer": (64, 48),
        "final_layer.linear": (64, 64),
    },
    "unet": {
        "input_blocks.0.0": (64, 4, 3, 3),
        "label_emb.0.0": (256, 128),
        "time_embed.0": (256, 64),
        "out.2": (4, 64, 3, 3),
        "input_blocks.4.1.proj_in": (64, 64),
        "input_blocks.4.1.transformer_blocks.0.attn2.to_k": (64, 128),
        "output_blocks.3.1.transformer_blocks.0.attn2.to_k": (64, 128),
    },
}
OTHERS = {
    "first_stage_model.decoder.conv_in": (64, 4, 3, 3),
    "first_stage_model.decoder.mid.attn_1.q": (64, 64),
    "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn.q_proj": (64, 64),
}
KINDS = {
    "flux": (FLUX, TELLING["flux"], ""),
    "flux in a bundle": (FLUX, TELLING["flux"], BUNDLED),
    "unet in a bundle": (UNET, TELLING["unet"], BUNDLED),
}


def write(folder: Path, kind: str) -> Path:
    packed, kept, prefix = KINDS[kind]
    torch.manual_seed(0)
    tensors = {
        f"{prefix}{name}.weight": torch.randn(shape).bfloat16()
        for name, shape in (packed | kept).items()
    }
    tensors |= {
        f"{prefix}{name}.bias": torch.randn(shape[0]).bfloat16() for name, shape in packed.items()
    }
    if prefix:  # a VAE in float32, which stays in it
        tensors |= {f"{name}.weight": torch.randn(shape) for name, shape in OTHERS.items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "original.safetensors")
    return folder / "original.safetensors"


def loaded(tensors: dict[str, torch.Tensor], prefix: str) -> tuple[torch.Tensor, bool]:
    """A linear layer's weight as those loaders read it, and whether it was packed."""
    state_keys = {
        key[len(f"{prefix}.weight.") :] for key in tensors if key.startswith(f"{prefix}.weight.")
    }
    if not any("bitsandbytes" in key for key in state_keys):
        return tensors[f"{prefix}.weight"], False
    stats = {key: tensors[f"{prefix}.weight.{key}"] for key in state_keys}
    weight = Params4bit.from_prequantized(
        tensors[f"{prefix}.weight"], stats, requires_grad=False, device="cpu"
    )
    assert weight.bnb_quantized
    return dequantize_4bit(weight.data, weight.quant_state), True


@pytest.mark.parametrize("double_quant", [True, False], ids=["nested", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_image_tools_find_what_they_look_for(tmp_path, kind, double_quant):
    source, out = write(tmp_path / "source", kind), tmp_path / "nf4.safetensors"
    options = QuantizeOptions(single_file=True, double_quant=double_quant)
    report = quantize_checkpoint(source, out, options, RunOptions(device="cpu", verify=True))
    before, after = load_file(source), load_file(out)
    packed, kept, prefix = KINDS[kind]
    for name in packed:
        values, is_packed = loaded(after, prefix + name)
        expected = decode(
            *quantize_4bit(before[f"{prefix}{name}.weight"], double_quant=double_quant)
        )
        assert is_packed
        assert torch.equal(values, expected), name
    for name, tensor in before.items():
        if name.removesuffix(".weight").removeprefix(prefix) not in packed:
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor), name
    for name, shape in kept.items():
        assert after[f"{prefix}{name}.weight"].shape == shape
    assert report.packed == len(packed)
    assert [path.name for path in tmp_path.iterdir() if path != source.parent] == [out.name]
    assert verify_checkpoint(out, source, run=CPU).passed


COMPONENTS = {
    "FluxTransformer2DModel": {
        **{
            f"transformer_blocks.3.attn.to_{part}.{leaf}": shape
            for part in "qkv"
            for leaf, shape in (("weight", (64, 64)), ("bias", (64,)))
        },
        "transformer_blocks.3.attn.norm_q.weight": (64,),
        "transformer_blocks.3.ff.net.2.weight": (64, 256),
        "norm_out.linear.weight": (128, 64),
        "norm_out.linear.bias": (128,),
        "x_embedder.weight": (64, 64),
    },
    "UNet2DConditionModel": {
        "conv_in.weight": (64, 4, 3, 3),
        "down_blocks.1.attentions.1.transformer_blocks.0.attn1.to_k.weight": (64, 64),
        "up_blocks.1.resnets.2.conv_shortcut.weight": (64, 128, 1, 1),
        "up_blocks.1.upsamplers.0.conv.bias": (64,),
        "up_blocks.1.attentions.2.transformer_blocks.0.attn1.to_k.weight": (64, 64),
        "down_blocks.0.downsamplers.0.conv.bias": (64,),
        "mid_block.attentions.0.norm.weight": (64,),
        "mid_block.resnets.1.norm1.weight": (64,),
    },
}
RENAMED = {
    "input_blocks.0.0.weight", "input_blocks.3.0.op.bias",
    "input_blocks.5.1.transformer_blocks.0.attn1.to_k.weight",
    "middle_block.1.norm.weight", "middle_block.2.in_layers.0.weight",
    "output_blocks.5.0.skip_connection.weight", "output_blocks.5.2.conv.bias",
    "output_blocks.5.1.transformer_blocks.0.attn1.to_k.weight",
}  # fmt: skip


def write_component(
    folder: Path, kind: str, tensors: dict[str, tuple[int, ...]] | None = None
) -> Path:
    """A component of diffusers with two layers a block, as far as it matters here."""
    torch.manual_seed(0)
    folder.mkdir(exist_ok=True)
    made = {
        name: torch.randn(shape).bfloat16() for name, shape in (tensors or COMPONENTS[kind]).items()
    }
    save_file(made, folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(json.dumps({"_class_name": kind, "layers_per_block": 2}))
    return folder


@pytest.mark.parametrize("is_packed", [False, True], ids=["16 bits", "4 bits"])
def test_what_flux_fuses_is_packed_as_one(tmp_path, is_packed):
    source, out = (
        write_component(tmp_path / "source", "FluxTransformer2DModel"),
        tmp_path / "nf4.safetensors",
    )
    before = load_file(source / "diffusion_pytorch_model.safetensors")
    parts = [before[f"transformer_blocks.3.attn.to_{part}.weight"] for part in "qkv"]
    if is_packed:
        quantize_checkpoint(source, tmp_path / "packed", run=CPU)
        source, parts = tmp_path / "packed", [decode(*quantize_4bit(part)) for part in parts]
    quantize_checkpoint(source, out, ONE, RunOptions(device="cpu", verify=True))
    after = load_file(out)
    weights = {
        "double_blocks.3.img_attn.qkv.weight": torch.cat(parts),
        "double_blocks.3.img_mlp.2.weight": before["transformer_blocks.3.ff.net.2.weight"],
    }
    for name, weight in weights.items():
        packed, state = quantize_4bit(weight)
        assert torch.equal(after[name], packed), name
        assert torch.equal(after[f"{name}.absmax"], state.absmax), name
    biases = [before[f"transformer_blocks.3.attn.to_{part}.bias"] for part in "qkv"]
    kept = {
        "double_blocks.3.img_attn.qkv.bias": torch.cat(biases),
        "double_blocks.3.img_attn.norm.query_norm.scale": before[
            "transformer_blocks.3.attn.norm_q.weight"
        ],
        "final_layer.adaLN_modulation.1.weight": before["norm_out.linear.weight"].roll(64, 0),
        "final_layer.adaLN_modulation.1.bias": before["norm_out.linear.bias"].roll(64, 0),
        "img_in.weight": before["x_embedder.weight"],
    }
    for name, tensor in kept.items():
        assert torch.equal(after[name], tensor), name
    assert {name for name in after if ".weight." not in name} == kept.keys() | weights.keys()
    assert verify_checkpoint(out, source, run=CPU).identical


def test_a_unet_gets_its_original_names(tmp_path):
    source = write_component(tmp_path / "source", "UNet2DConditionModel")
    plan = plan_quantization(source, ONE)
    assert {job.name.removeprefix(BUNDLED) for job in plan.output.jobs} == RENAMED


REFUSED = {
    "class": (
        "SD3Transformer2DModel",
        ["transformer_blocks.0.attn.to_q.weight"],
        "cannot be mapped",
    ),
    "part": (
        "FluxTransformer2DModel",
        ["transformer_blocks.0.attn.to_q.weight"],
        "qkv.weight cannot be made of .*to_q",
    ),
    "Flux": (
        "FluxTransformer2DModel",
        ["controlnet_blocks.0.weight"],
        "controlnet_blocks.0.weight: has no name",
    ),
    "UNet": (
        "UNet2DConditionModel",
        ["time_embedding.cond_proj.weight"],
        "cond_proj.weight: has no name",
    ),
    "module": (
        "UNet2DConditionModel",
        ["down_blocks.0.motion_modules.0.norm.bias"],
        "norm.bias: has no name",
    ),
    "attention": (
        "UNet2DConditionModel",
        ["down_blocks.0.attentions.0.to_k.weight"],
        "to_k.weight: has no name",
    ),
    "no attention": (
        "UNet2DConditionModel",
        ["mid_block.resnets.1.conv1.bias"],
        "conv1.bias: has no name",
    ),
    "odd": (
        "FluxTransformer2DModel",
        ["norm_out.linear.bias"],
        "adaLN_modulation.1.bias cannot be made of",
    ),
    "two": (
        "UNet2DConditionModel",
        ["down_blocks.0.resnets.3.conv1.bias", "down_blocks.1.resnets.0.conv1.bias"],
        "made",
    ),
}


@pytest.mark.parametrize(("kind", "names", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_mapped_is_refused(tmp_path, kind, names, message):
    tensors = dict.fromkeys(names, (65,) if names == ["norm_out.linear.bias"] else (64, 64))
    with pytest.raises(PlanError, match=message):
        quantize_checkpoint(
            write_component(tmp_path / "source", kind, tensors),
            tmp_path / "nf4.safetensors",
            ONE,
            CPU,
        )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_of_a_diffusers_pipeline_one_component_is_asked_for(tmp_path):
    write_component(tmp_path / "transformer", "FluxTransformer2DModel")
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(PlanError, match="--subfolder transformer, or unet"):
        plan_quantization(tmp_path, ONE)
    assert plan_quantization(tmp_path, ONE, SourceOptions(subfolder="transformer")).output.jobs


def test_the_output_is_one_file_and_never_a_half_of_one(tmp_path, monkeypatch):
    source, out = write(tmp_path / "source", "flux"), tmp_path / "nf4.safetensors"
    with pytest.raises(PlanError, match=r"such as OUT\.safetensors"):
        quantize_checkpoint(source, tmp_path / "out", ONE, CPU)
    with pytest.raises(PlanError, match="are for folders"):
        quantize_checkpoint(source, out, ONE, RunOptions(device="cpu", checksum=True))
    with pytest.raises(PlanError, match="are for folders"):
        quantize_checkpoint(source, out, ONE, CPU, push=PushOptions(push_to_hub="org/name"))
    with monkeypatch.context() as patched:
        patched.setattr("nf4conv.output.workspace.Workspace.complete", stop)
        with pytest.raises(Nf4convError, match="stopped"):
            quantize_checkpoint(source, out, ONE, CPU)
    assert not out.exists()
    assert quantize_checkpoint(source, out, ONE, CPU).shards_resumed == 1
    content = out.read_bytes()
    assert quantize_checkpoint(source, out, ONE, CPU).already_complete
    assert out.read_bytes() == content
    shown = CliRunner().invoke(
        main, ["quantize", str(source), "--single-file", str(out), "--overwrite", "--device", "cpu"]
    )
    assert shown.exit_code == 0, shown.output
    assert out.read_bytes() == content


def stop(*_: object) -> None:
    raise OutputError("stopped")


def searched(folder: Path, *, verify: bool = False) -> tuple[Path, Path]:
    """A source, and the single file that is made of it with searched scales."""
    source, out = write(folder / "source", "flux"), folder / "nf4.safetensors"
    options = QuantizeOptions(single_file=True, scales="search")
    quantize_checkpoint(source, out, options, RunOptions(device="cpu", verify=verify))
    return source, out


def test_a_single_file_says_how_it_was_made(tmp_path):
    source, out = searched(tmp_path)
    with safe_open(out, "pt") as file:
        metadata = file.metadata()
    record = json.loads(metadata["nf4conv.json"])
    assert metadata["format"] == "pt"
    assert record["options"]["scales"] == "search"
    assert [group["scales"] for group in record["weights"]] == ["search"]
    assert "verified" not in record
    for options in (None, VerifyOptions(exact=True)):
        found = verify_checkpoint(out, source, options, CPU)
        assert found.passed, found.verdict
        assert found.made == record
    assert verify_checkpoint(out, run=CPU).passed


def test_no_repair_of_a_sound_single_file_is_advised(tmp_path):
    _, out = searched(tmp_path)
    found = inspect_checkpoint(out)
    assert not [finding for finding in found.findings if finding.is_fault]
    plan = plan_quantization(out)
    assert plan.totals().stay == plan.totals().packed == len(FLUX)
    assert {weight.format.scales for weight in plan.weights.values()} == {"search"}


@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
def test_the_same_command_again_says_already_complete(tmp_path, verify):
    source, out = searched(tmp_path, verify=verify)
    before = out.read_bytes()
    command = ["quantize", str(source), str(out), "--single-file", "--scales", "search"]
    command += ["--device", "cpu", *(["--verify"] if verify else [])]
    again = CliRunner().invoke(main, command)
    assert again.exit_code == 0, again.output
    assert "already complete" in again.output
    assert out.read_bytes() == before
    other = CliRunner().invoke(main, [*command, "--blocksize", "128"])
    assert other.exit_code == 2
    assert "holds the result of another job (nf4conv.json: blocksize was" in other.output


def test_a_damaged_single_file_is_not_complete(tmp_path):
    source, out = searched(tmp_path, verify=True)
    before = out.read_bytes()
    options = QuantizeOptions(single_file=True, scales="search")
    out.write_bytes(before[:-1])
    with pytest.raises(OutputError, match="is damaged"):
        quantize_checkpoint(source, out, options, CPU)
    middle = len(before) // 2
    flipped = bytes([before[middle] ^ 1])
    out.write_bytes(before[:middle] + flipped + before[middle + 1 :])
    with pytest.raises(VerificationError, match="--overwrite makes it anew"):
        quantize_checkpoint(source, out, options, RunOptions(device="cpu", verify=True))
    foreign = tmp_path / "foreign.safetensors"
    save_file({"a": torch.ones(1)}, foreign)
    with pytest.raises(OutputError, match="exists; choose another file"):
        quantize_checkpoint(source, foreign, options, CPU)


def test_an_output_that_is_a_pipe_is_refused(tmp_path):
    """Opening it would wait for ever."""
    source, out = write(tmp_path / "source", "flux"), tmp_path / "out.safetensors"
    os.mkfifo(out)
    with pytest.raises(OutputError, match=r"out\.safetensors: exists; choose another file"):
        quantize_checkpoint(source, out, ONE, CPU)


def test_what_an_interrupted_run_leaves_is_cleared_away(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    source = write(tmp_path / "source", "flux")
    out = tmp_path / "nf4.safetensors"
    with monkeypatch.context() as patched:
        patched.setattr(single_file, "remove", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, out, ONE, CPU)
    left = out.with_name(f"{out.name}.unfinished")
    assert left.exists()
    assert quantize_checkpoint(source, out, ONE, CPU).already_complete
    assert not left.exists()
