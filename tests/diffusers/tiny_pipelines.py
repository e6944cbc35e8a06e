"""Tiny diffusers pipelines, one function each, without the tokenizers, which would have to be
downloaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from tiny_denoisers import (
    WIDTH,
    Denoiser,
    flux,
    pixart,
    stable_diffusion,
    stable_diffusion_3,
    stable_diffusion_xl,
    wan,
)


@dataclass(frozen=True)
class Pipeline:
    """A pipeline, and what its components are held to.

    Attributes:
        whole: the pipeline.
        inputs: of the components that are quantized, by name.
        kept: linear layers that their library packs by itself and we do not, by component, numbers
            as N.
    """

    whole: Any
    inputs: Mapping[str, Mapping[str, Any]]
    kept: Mapping[str, frozenset[str]] = field(default_factory=dict)


def words(*names: str) -> dict[str, dict[str, Any]]:
    """The inputs of text encoders."""
    return {name: {"input_ids": torch.arange(1, 11)[None]} for name in names}


def clip(kind: str = "CLIPTextModel") -> torch.nn.Module:
    import transformers

    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "projection_dim": WIDTH}
    config = transformers.CLIPTextConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    return getattr(transformers, kind)(config)


def t5(kind: str = "T5") -> torch.nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        d_model=WIDTH, d_ff=2 * WIDTH, d_kv=16, num_layers=2, num_heads=4, vocab_size=64
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def vae() -> torch.nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(block_out_channels=(4,), latent_channels=1, norm_num_groups=1)


def _with_transformer(whole: Any, denoiser: Denoiser, encoders: int) -> Pipeline:
    names = [
        f"text_encoder_{number}" if number > 1 else "text_encoder"
        for number in range(1, encoders + 1)
    ]
    return Pipeline(
        whole, {**words(*names), "transformer": denoiser.inputs}, {"transformer": denoiser.kept}
    )


def flux_pipeline() -> Pipeline:
    import diffusers

    denoiser, scheduler = flux(), diffusers.FlowMatchEulerDiscreteScheduler()
    whole = diffusers.FluxPipeline(scheduler, vae(), clip(), None, t5(), None, denoiser.make())
    return _with_transformer(whole, denoiser, 2)


def stable_diffusion_3_pipeline() -> Pipeline:
    import diffusers

    denoiser, scheduler = stable_diffusion_3(), diffusers.FlowMatchEulerDiscreteScheduler()
    projecting = [clip("CLIPTextModelWithProjection") for _ in range(2)]
    whole = diffusers.StableDiffusion3Pipeline(
        denoiser.make(), scheduler, vae(), projecting[0], None, projecting[1], None, t5(), None
    )
    return _with_transformer(whole, denoiser, 3)


def pixart_pipeline() -> Pipeline:
    import diffusers

    denoiser = pixart()
    whole = diffusers.PixArtSigmaPipeline(
        None, t5(), vae(), denoiser.make(), diffusers.DPMSolverMultistepScheduler()
    )
    return _with_transformer(whole, denoiser, 1)


def wan_pipeline() -> Pipeline:
    """Two denoisers, as in Wan 2.2: one for much noise, one for little."""
    import diffusers

    denoiser, scheduler = wan(), diffusers.FlowMatchEulerDiscreteScheduler()
    decoder = diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[True]
    )
    whole = diffusers.WanPipeline(
        None, t5("UMT5"), decoder, scheduler, denoiser.make(), denoiser.make(), boundary_ratio=0.9
    )
    one = _with_transformer(whole, denoiser, 1)
    return Pipeline(
        whole,
        {**one.inputs, "transformer_2": denoiser.inputs},
        {**one.kept, "transformer_2": denoiser.kept},
    )


def stable_diffusion_pipeline() -> Pipeline:
    import diffusers

    denoiser, scheduler = stable_diffusion(), diffusers.EulerDiscreteScheduler()
    whole = diffusers.StableDiffusionPipeline(
        vae(), clip(), None, denoiser.make(), scheduler, None, None, requires_safety_checker=False
    )
    return Pipeline(
        whole, {**words("text_encoder"), "unet": denoiser.inputs}, {"unet": denoiser.kept}
    )


def stable_diffusion_xl_pipeline() -> Pipeline:
    import diffusers

    denoiser, scheduler = stable_diffusion_xl(), diffusers.EulerDiscreteScheduler()
    encoders = clip(), clip("CLIPTextModelWithProjection")
    whole = diffusers.StableDiffusionXLPipeline(
        vae(), *encoders, None, None, denoiser.make(), scheduler
    )
    inputs = {**words("text_encoder", "text_encoder_2"), "unet": denoiser.inputs}
    return Pipeline(whole, inputs, {"unet": denoiser.kept})


PIPELINES: Final[Mapping[str, Callable[[], Pipeline]]] = {
    make.__name__: make
    for make in (
        flux_pipeline,
        stable_diffusion_pipeline,
        stable_diffusion_xl_pipeline,
        stable_diffusion_3_pipeline,
        pixart_pipeline,
        wan_pipeline,
    )
}
