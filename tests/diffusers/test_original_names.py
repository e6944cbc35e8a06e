"""`--single-file` of what diffusers saves: read back by diffusers' own conversion of original
files.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_denoisers import Denoiser, flux, stable_diffusion, stable_diffusion_xl

from nf4conv.codec.ops import dequantize_4bit, quantize_4bit
from nf4conv.codec.quant_state import QuantState
from nf4conv.commands.quantize import quantize_checkpoint
from nf4conv.commands.verify import verify_checkpoint
from nf4conv.options import QuantizeOptions, RunOptions

single_file_utils = pytest.importorskip(
    "diffusers.loaders.single_file_utils", reason="make test-diffusers installs it"
)

pytestmark = pytest.mark.architectures
CPU = RunOptions(device="cpu", verify=True)
WIDTH = 64


def larger(denoiser: Denoiser, **config: object) -> Denoiser:
    return replace(denoiser, config={**denoiser.config, **config})


def flux_converted(tensors: dict[str, torch.Tensor], _: object) -> dict[str, torch.Tensor]:
    """Converts names with diffusers' own function, which has one width of Flux in its code; here it
    gets ours.
    """
    convert = single_file_utils.convert_flux_transformer_checkpoint_to_diffusers
    constants = tuple(
        WIDTH if constant == 3072 else constant for constant in convert.__code__.co_consts
    )
    assert constants.count(WIDTH) == 1
    tiny = type(convert)(convert.__code__.replace(co_consts=constants), convert.__globals__)
    return tiny(tensors)


FOUR_BLOCKS = {
    "layers_per_block": 2,
    "block_out_channels": (32, 64, 64, 64),
    "down_block_types": (*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * 3),
}
KINDS = {
    "Flux": (
        larger(flux(), num_layers=2, num_single_layers=3, guidance_embeds=True),
        flux_converted,
    ),
    "Flux schnell": (flux(), flux_converted),
    "Stable Diffusion": (
        larger(stable_diffusion(), **FOUR_BLOCKS),
        single_file_utils.convert_ldm_unet_checkpoint,
    ),
    "one layer a block": (stable_diffusion(), single_file_utils.convert_ldm_unet_checkpoint),
    "Stable Diffusion XL": (stable_diffusion_xl(), single_file_utils.convert_ldm_unet_checkpoint),
}
FUSED = (
    ("to_q", "to_k", "to_v"),
    ("add_q_proj", "add_k_proj", "add_v_proj"),
    ("to_q", "to_k", "to_v", "proj_mlp"),
)


def decoded(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, those in 4 bits decoded."""
    stored, found = load_file(file), {}
    for name, tensor in stored.items():
        parts = {
            key.removeprefix(f"{name}."): part
            for key, part in stored.items()
            if key.startswith(f"{name}.")
        }
        if parts:
            found[name] = dequantize_4bit(tensor, QuantState.from_components(parts))
        elif not any(
            f".weight.{part}" in name for part in ("absmax", "quant_map", "nested_", "quant_state")
        ):
            found[name] = tensor
    return found


def packed_alone(state: dict[str, torch.Tensor], name: str, *, is_flux: bool) -> torch.Tensor:
    """Returns a weight as it is after it was packed together with its neighbours in an original
    weight.
    """
    module, _, leaf = name.removesuffix(".weight").rpartition(".")
    base = module.removesuffix(".attn") if name.startswith("single_") else module
    parts = [name]
    if is_flux and name.startswith("single_") and leaf in FUSED[2]:
        parts = [f"{base}.attn.{part}.weight" for part in FUSED[0]] + [f"{base}.proj_mlp.weight"]
    elif is_flux:
        parts = [
            f"{module}.{part}.weight" for fused in FUSED[:2] if leaf in fused for part in fused
        ] or parts
    together = dequantize_4bit(*quantize_4bit(torch.cat([state[part] for part in parts])))
    first = sum(len(state[part]) for part in parts[: parts.index(name)])
    return together[first : first + len(state[name])]


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_reads_back_what_it_saved(kind, tmp_path):
    torch.manual_seed(0)
    denoiser, convert = KINDS[kind]
    model = denoiser.make().bfloat16()
    model.save_pretrained(tmp_path / "source", max_shard_size="100KB")
    state = load_state(tmp_path / "source")
    report = quantize_checkpoint(
        tmp_path / "source", tmp_path / "one.safetensors", QuantizeOptions(single_file=True), CPU
    )
    found = convert(decoded(tmp_path / "one.safetensors"), dict(model.config))
    assert found.keys() == state.keys()
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, state[name])}
    for name, tensor in state.items():
        expected = (
            packed_alone(state, name, is_flux=kind.startswith("Flux"))
            if name in changed
            else tensor
        )
        assert torch.equal(found[name], expected), name
    linear = {
        f"{path}.weight"
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    blocks = {name for name in linear if "transformer_blocks." in name}
    assert changed == {
        name
        for name in blocks
        if kind.startswith("Flux") or not name.endswith("blocks.0.attn2.to_k.weight")
    }
    assert report.packed
    assert verify_checkpoint(
        tmp_path / "one.safetensors", tmp_path / "source", run=RunOptions(device="cpu")
    ).identical


def load_state(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
