"""Tiny pipelines made and loaded by the installed diffusers: what it makes of our output, against its own quantization.

diffusers asks for a GPU before it quantizes or loads; without one that question is not asked here, and bitsandbytes
computes on the CPU, which rounds a few nested scales differently (docs/format.md).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nf4conv.components import execute_quantizing, plan_quantizing
from nf4conv.options import RunOptions

pytestmark = pytest.mark.architectures

NOT_SAVED = ("tokenizer", "tokenizer_2", "feature_extractor", "image_encoder", "safety_checker")
OUTSIDE = {
    "flux": {"context_embedder", "norm_out.linear", "time_text_embed.text_embedder", "x_embedder"}
    | {"time_text_embed.timestep_embedder"},
    "sd": {"time_embedding"},
    "sdxl": {"time_embedding", "add_embedding"},
}
"""What diffusers packs and we do not: the linear layers outside the blocks."""


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    if not torch.cuda.is_available():
        monkeypatch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda *_, **__: None)
        monkeypatch.setattr(BnB4BitDiffusersQuantizer, "update_device_map", lambda *_: {"": "cpu"})


def text_encoder(kind: str) -> torch.nn.Module:
    import transformers

    if kind == "t5":
        t5 = transformers.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, vocab_size=64)
        return transformers.T5EncoderModel(t5)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return getattr(transformers, kind)(transformers.CLIPTextConfig(**sizes, vocab_size=64, projection_dim=32))


def make_vae() -> torch.nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)


def make_unet(**more: Any) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        **more,
    )


def flux() -> Any:
    import diffusers

    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return diffusers.FluxPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(),
        make_vae(),
        text_encoder("CLIPTextModel"),
        None,
        text_encoder("t5"),
        None,
        transformer,
    )


def sd() -> Any:
    import diffusers

    encoder, scheduler = text_encoder("CLIPTextModel"), diffusers.EulerDiscreteScheduler()
    return diffusers.StableDiffusionPipeline(
        make_vae(), encoder, None, make_unet(), scheduler, None, None, requires_safety_checker=False
    )


def sdxl() -> Any:
    import diffusers

    unet = make_unet(
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=80,
        transformer_layers_per_block=(1, 2),
    )
    encoders = text_encoder("CLIPTextModel"), text_encoder("CLIPTextModelWithProjection")
    return diffusers.StableDiffusionXLPipeline(
        make_vae(), *encoders, None, None, unet, diffusers.EulerDiscreteScheduler()
    )


def forward(name: str, model: torch.nn.Module) -> torch.Tensor:
    """The output for fixed inputs. In training mode: bitsandbytes' kernel for CPU inference takes no tiny layer."""
    model.train()
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    torch.manual_seed(0)  # of dropout
    with torch.no_grad():
        if name.startswith("text_encoder"):
            return model(torch.arange(1, 11, device=device)[None])[0]
        if name == "unet":
            added = {"text_embeds": noise(1, 32), "time_ids": torch.ones(1, 6, device=device)}
            step = torch.tensor([3], device=device)
            return model(noise(1, 4, 16, 16), step, noise(1, 5, 32), added_cond_kwargs=added).sample
        return model(
            hidden_states=noise(1, 16, 4),
            encoder_hidden_states=noise(1, 5, 32),
            pooled_projections=noise(1, 32),
            timestep=noise(1),
            img_ids=torch.zeros(16, 3, device=device),
            txt_ids=torch.zeros(5, 3, device=device),
        ).sample


def packed(model: torch.nn.Module) -> dict[str, Any]:
    import bitsandbytes

    return {name: module for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)}


def own_quantization(library: Any, kind: Any, folder: Path, skip: list[str] | None) -> torch.nn.Module:
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
    config = library.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=skip, **settings
    )
    return kind.from_pretrained(folder, torch_dtype=torch.bfloat16, quantization_config=config)


@pytest.mark.parametrize("make", [flux, sd, sdxl], ids=lambda make: make.__name__)
def test_a_pipeline_is_what_diffusers_makes_itself(make, tmp_path):
    import diffusers
    import transformers

    torch.manual_seed(0)
    source, out = tmp_path / "source", tmp_path / "out"
    original = make().to(torch.bfloat16)
    original.save_pretrained(source)
    execute_quantizing(plan_quantizing(source), out, RunOptions(device="cpu"))
    absent = {name: None for name in NOT_SAVED if name in original.components}
    whole = type(original).from_pretrained(out, torch_dtype=torch.bfloat16, **absent)
    names = [name for name in whole.components if name.startswith(("text_encoder", "unet", "transformer"))]
    for name in names:
        kind = type(getattr(original, name))
        library = diffusers if kind.__module__.startswith("diffusers") else transformers
        skip = json.loads((out / name / "config.json").read_bytes())["quantization_config"]["llm_int8_skip_modules"]
        ours = kind.from_pretrained(out / name, torch_dtype=torch.bfloat16)
        theirs = own_quantization(library, kind, source / name, skip)
        modules, expected = packed(ours), packed(theirs)
        assert modules.keys() == expected.keys() == packed(getattr(whole, name)).keys()
        beyond = packed(own_quantization(library, kind, source / name, None)).keys() - modules.keys()
        allowed = OUTSIDE[make.__name__] if library is diffusers else set()
        assert {module.rpartition(".linear_")[0] or module for module in beyond} == allowed
        for module, reference in expected.items():
            assert torch.equal(modules[module].weight.data, reference.weight.data), f"{name}: {module}"
        output = forward(name, theirs)
        difference = (forward(name, ours) - output).abs().max() / output.abs().max()
        assert difference < 0.02, f"{name}: {difference}"
