"""Lists which modules of diffusers stand in each module of an original denoiser.

The rows of the modules stand one after the other; # is the number of a block. diffusers does the
same the other way round when it loads an original file (0.42.1: loaders/single_file_utils.py).
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class OriginalName(NamedTuple):
    """The place of a module of diffusers in an original file."""

    name: str  # of the original module
    place: int = 0  # which part of its rows the module is
    places: int = 1  # how many such parts there are


def _by_diffusers_name(table: Mapping[str, tuple[str, ...]]) -> Mapping[str, OriginalName]:
    """Turns a table of the modules in each original module round."""
    found = {}
    for name, modules in table.items():
        for place, module in enumerate(modules):
            found[module] = OriginalName(name, place, len(modules))
    return found


_FLUX: Final = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "double_blocks.#.img_mod.lin": ("transformer_blocks.#.norm1.linear",),
    "double_blocks.#.txt_mod.lin": ("transformer_blocks.#.norm1_context.linear",),
    "double_blocks.#.img_attn.qkv": (
        "transformer_blocks.#.attn.to_q",
        "transformer_blocks.#.attn.to_k",
        "transformer_blocks.#.attn.to_v",
    ),
    "double_blocks.#.txt_attn.qkv": (
        "transformer_blocks.#.attn.add_q_proj",
        "transformer_blocks.#.attn.add_k_proj",
        "transformer_blocks.#.attn.add_v_proj",
    ),
    "double_blocks.#.img_attn.norm.query_norm": ("transformer_blocks.#.attn.norm_q",),
    "double_blocks.#.img_attn.norm.key_norm": ("transformer_blocks.#.attn.norm_k",),
    "double_blocks.#.txt_attn.norm.query_norm": ("transformer_blocks.#.attn.norm_added_q",),
    "double_blocks.#.txt_attn.norm.key_norm": ("transformer_blocks.#.attn.norm_added_k",),
    "double_blocks.#.img_attn.proj": ("transformer_blocks.#.attn.to_out.0",),
    "double_blocks.#.txt_attn.proj": ("transformer_blocks.#.attn.to_add_out",),
    "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.net.0.proj",),
    "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.net.2",),
    "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.net.0.proj",),
    "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.net.2",),
    "single_blocks.#.modulation.lin": ("single_transformer_blocks.#.norm.linear",),
    "single_blocks.#.linear1": (
        "single_transformer_blocks.#.attn.to_q",
        "single_transformer_blocks.#.attn.to_k",
        "single_transformer_blocks.#.attn.to_v",
        "single_transformer_blocks.#.proj_mlp",
    ),
    "single_blocks.#.norm.query_norm": ("single_transformer_blocks.#.attn.norm_q",),
    "single_blocks.#.norm.key_norm": ("single_transformer_blocks.#.attn.norm_k",),
    "single_blocks.#.linear2": ("single_transformer_blocks.#.proj_out",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_UNET: Final = {
    "time_embed.0": ("time_embedding.linear_1",),
    "time_embed.2": ("time_embedding.linear_2",),
    "label_emb.0.0": ("add_embedding.linear_1",),
    "label_emb.0.2": ("add_embedding.linear_2",),
    "input_blocks.0.0": ("conv_in",),
    "out.0": ("conv_norm_out",),
    "out.2": ("conv_out",),
}
_RESNETS: Final = {
    "in_layers.0": ("norm1",),
    "in_layers.2": ("conv1",),
    "emb_layers.1": ("time_emb_proj",),
    "out_layers.0": ("norm2",),
    "out_layers.3": ("conv2",),
    "skip_connection": ("conv_shortcut",),
}

FLUX: Final = _by_diffusers_name(_FLUX)
"""Modules of FluxTransformer2DModel."""

OUTSIDE_BLOCKS: Final = _by_diffusers_name(_UNET)
"""Modules of UNet2DConditionModel outside of its blocks."""

INSIDE_BLOCKS: Final = {
    "resnets": _by_diffusers_name(_RESNETS),
    "downsamplers": {"conv": OriginalName("op")},
    "upsamplers": {"conv": OriginalName("conv")},
}
"""Modules in the layers of a UNet's blocks, by the kind of layer."""
