"""Tiny denoisers of diffusers, one function each: how the class is made small, what goes in, what
we keep.

Widths are multiples of 64 where layers are packed: bitsandbytes' CPU kernels decode other weights
wrongly.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

WIDTH: Final = 64
HEADS: Final = {"num_attention_heads": 4, "attention_head_dim": 16}
TOKENS: Final = 5
"""Of the prompt."""


@dataclass(frozen=True)
class Denoiser:
    """A class of diffusers, made small.

    Attributes:
        name: of the class.
        config: what it is made with.
        inputs: of its forward.
        kept: linear layers that diffusers packs by itself and we do not, numbers as N.
    """

    name: str
    config: Mapping[str, Any]
    inputs: Mapping[str, Any]
    kept: frozenset[str]

    def make(self) -> torch.nn.Module:
        import diffusers

        return getattr(diffusers, self.name)(**self.config)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def image(channels: int = 4) -> torch.Tensor:
    return noise(1, channels, 8, 8)


def video(channels: int = 4) -> torch.Tensor:
    return noise(1, channels, 1, 8, 8)


def prompt() -> torch.Tensor:
    return noise(1, TOKENS, WIDTH)


def mask() -> torch.Tensor:
    return torch.ones(1, TOKENS, dtype=torch.bool)


def time() -> torch.Tensor:
    return torch.tensor([3])


def below(parent: str, *names: str) -> frozenset[str]:
    return frozenset(f"{parent}.{name}" for name in names)


def mlp(parent: str) -> frozenset[str]:
    """Returns the modules that diffusers names linear_1 and linear_2 below a parent."""
    return below(parent, "linear_1", "linear_2")


def stable_diffusion() -> Denoiser:
    return Denoiser(
        "UNet2DConditionModel",
        {
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": WIDTH,
            "norm_num_groups": 8,
        },
        {"sample": noise(1, 4, 16, 16), "timestep": time(), "encoder_hidden_states": prompt()},
        mlp("time_embedding"),
    )


def stable_diffusion_xl() -> Denoiser:
    plain = stable_diffusion()
    return Denoiser(
        plain.name,
        {
            **plain.config,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
            "transformer_layers_per_block": (1, 2),
        },
        {
            **plain.inputs,
            "added_cond_kwargs": {"text_embeds": noise(1, WIDTH), "time_ids": torch.ones(1, 6)},
        },
        plain.kept | mlp("add_embedding"),
    )


def flux() -> Denoiser:
    return Denoiser(
        "FluxTransformer2DModel",
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": WIDTH,
            "pooled_projection_dim": WIDTH,
            "axes_dims_rope": [4, 4, 8],
        },
        {
            "hidden_states": noise(1, 16, 4),
            "encoder_hidden_states": prompt(),
            "pooled_projections": noise(1, WIDTH),
            "timestep": time(),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(TOKENS, 3),
        },
        frozenset({"context_embedder", "norm_out.linear", "x_embedder"})
        | mlp("time_text_embed.text_embedder")
        | mlp("time_text_embed.timestep_embedder"),
    )


def flux_2() -> Denoiser:
    return Denoiser(
        "Flux2Transformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": WIDTH,
            "timestep_guidance_channels": WIDTH,
            "axes_dims_rope": (4, 4, 4, 4),
        },
        {
            "hidden_states": noise(1, 16, 16),
            "encoder_hidden_states": prompt(),
            "timestep": time(),
            "guidance": torch.ones(1),
            "img_ids": torch.zeros(1, 16, 4),
            "txt_ids": torch.zeros(1, TOKENS, 4),
        },
        frozenset({"context_embedder", "norm_out.linear", "proj_out", "x_embedder"})
        | {
            f"{stream}.linear"
            for stream in ("double_stream_modulation_img", "double_stream_modulation_txt")
        }
        | {"single_stream_modulation.linear"}
        | mlp("time_guidance_embed.guidance_embedder")
        | mlp("time_guidance_embed.timestep_embedder"),
    )


def stable_diffusion_3() -> Denoiser:
    return Denoiser(
        "SD3Transformer2DModel",
        {
            **HEADS,
            "sample_size": 8,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "joint_attention_dim": WIDTH,
            "caption_projection_dim": WIDTH,
            "pooled_projection_dim": WIDTH,
            "pos_embed_max_size": 8,
            "dual_attention_layers": (0,),
            "qk_norm": "rms_norm",
        },
        {
            "hidden_states": image(),
            "encoder_hidden_states": prompt(),
            "pooled_projections": noise(1, WIDTH),
            "timestep": time(),
        },
        frozenset({"context_embedder", "norm_out.linear", "proj_out"})
        | mlp("time_text_embed.text_embedder")
        | mlp("time_text_embed.timestep_embedder"),
    )


def pixart() -> Denoiser:
    return Denoiser(
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 12,  # the width is split in three by the conditions
            "attention_head_dim": 16,
            "num_layers": 1,
            "cross_attention_dim": 3 * WIDTH,
            "caption_channels": WIDTH,
            "sample_size": 8,
            "use_additional_conditions": True,
        },
        {
            "hidden_states": image(),
            "encoder_hidden_states": prompt(),
            "timestep": time(),
            "added_cond_kwargs": {"resolution": noise(1, 2), "aspect_ratio": noise(1, 1)},
        },
        frozenset({"adaln_single.linear", "proj_out"})
        | mlp("caption_projection")
        | mlp("adaln_single.emb.timestep_embedder")
        | mlp("adaln_single.emb.resolution_embedder")
        | mlp("adaln_single.emb.aspect_ratio_embedder"),
    )


def qwen_image() -> Denoiser:
    return Denoiser(
        "QwenImageTransformer2DModel",
        {
            **HEADS,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": 1,
            "joint_attention_dim": WIDTH,
            "axes_dims_rope": (4, 6, 6),
        },
        {
            "hidden_states": noise(1, 16, 16),
            "encoder_hidden_states": prompt(),
            "encoder_hidden_states_mask": mask(),
            "timestep": time(),
            "img_shapes": [[(1, 4, 4)]],
        },
        frozenset({"img_in", "norm_out.linear", "proj_out", "txt_in"})
        | mlp("time_text_embed.timestep_embedder"),
    )


def hidream() -> Denoiser:
    return Denoiser(
        "HiDreamImageTransformer2DModel",
        {
            **HEADS,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "caption_channels": [WIDTH, WIDTH],
            "text_emb_dim": WIDTH,
            "axes_dims_rope": (8, 4, 4),
            "max_resolution": (8, 8),
            "llama_layers": [0, 1],
            "force_inference_output": True,
        },
        {
            "hidden_states": image(),
            "timesteps": time(),
            "encoder_hidden_states_t5": prompt(),
            "encoder_hidden_states_llama3": noise(2, 1, TOKENS, WIDTH),
            "pooled_embeds": noise(1, WIDTH),
        },
        below("final_layer", "adaLN_modulation.N", "linear")
        | {"x_embedder.proj"}
        | mlp("p_embedder.pooled_embedder")
        | mlp("t_embedder.timestep_embedder"),
    )


def wan() -> Denoiser:
    return Denoiser(
        "WanTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": WIDTH,
            "freq_dim": WIDTH,
            "ffn_dim": 2 * WIDTH,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        {"hidden_states": video(), "timestep": time(), "encoder_hidden_states": prompt()},
        frozenset({"condition_embedder.time_proj", "proj_out"})
        | mlp("condition_embedder.text_embedder"),
    )


def hunyuan_video() -> Denoiser:
    return Denoiser(
        "HunyuanVideoTransformer3DModel",
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": WIDTH,
            "pooled_projection_dim": WIDTH,
            "rope_axes_dim": (4, 6, 6),
        },
        {
            "hidden_states": video(),
            "timestep": time(),
            "encoder_hidden_states": prompt(),
            "encoder_attention_mask": mask(),
            "pooled_projections": noise(1, WIDTH),
            "guidance": torch.ones(1),
        },
        # the refiner's norm_out cannot be told from the one outside
        frozenset({"context_embedder.token_refiner.refiner_blocks.N.norm_out.linear"})
        | {"context_embedder.proj_in", "norm_out.linear"}
        | mlp("context_embedder.time_text_embed.text_embedder")
        | mlp("context_embedder.time_text_embed.timestep_embedder")
        | mlp("time_text_embed.guidance_embedder")
        | mlp("time_text_embed.text_embedder")
        | mlp("time_text_embed.timestep_embedder"),
    )


def kandinsky_5() -> Denoiser:
    return Denoiser(
        "Kandinsky5Transformer3DModel",
        {
            "in_text_dim": WIDTH,
            "in_text_dim2": WIDTH,
            "time_dim": WIDTH,
            "model_dim": WIDTH,
            "ff_dim": 2 * WIDTH,
            "num_text_blocks": 1,
            "num_visual_blocks": 1,
            "axes_dims": (4, 6, 6),
        },
        {
            "hidden_states": noise(1, 1, 8, 8, 4),
            "encoder_hidden_states": prompt(),
            "timestep": time(),
            "pooled_projections": noise(1, WIDTH),
            "visual_rope_pos": [torch.arange(1), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(TOKENS),
        },
        # what modulates inside the blocks, diffusers itself keeps in float32
        frozenset({"out_layer.out_layer"})
        | {
            f"{part}.in_layer"
            for part in ("pooled_text_embeddings", "text_embeddings", "visual_embeddings")
        },
    )


DENOISERS: Final[Mapping[str, Callable[[], Denoiser]]] = {
    make.__name__: make
    for make in (
        stable_diffusion,
        stable_diffusion_xl,
        flux,
        flux_2,
        stable_diffusion_3,
        pixart,
        qwen_image,
        hidream,
        wan,
        hunyuan_video,
        kandinsky_5,
    )
}
