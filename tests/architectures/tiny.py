"""Tiny random checkpoints of any architecture that the installed transformers knows, and inputs for
their models.

Sizes are multiples of 64 (columns) and 32 (rows): bitsandbytes' CPU kernels decode other weights
wrongly or not at all.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from changes import CHANGES

WIDTH = 64

# names that configs have for one kind of size
HIDDEN_WIDTHS = [
    "hidden_size", "d_model", "n_embd", "embed_dim", "embedding_size", "hidden_dim", "dim",
    "emb_dim", "word_embed_proj_dim", "projection_dim", "output_dim", "hidden_act_dim",
    "encoder_dim", "decoder_dim", "rotary_dim_base", "encoder_hidden_size", "decoder_hidden_size",
    "attention_hidden_size", "text_hidden_size", "q_lora_rank", "kv_lora_rank",
    "proj_codevector_dim", "codevector_dim", "classifier_proj_size", "conv_dim_in",
    "bottleneck_size", "true_hidden_size", "intra_bottleneck_size", "lru_width", "adapter_dim",
    "proj_size", "vision_feature_size", "out_hidden_size", "index_hidden",
]  # fmt: skip
INNER_WIDTHS = [
    "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff",
    "hidden_dim_ffn", "moe_intermediate_size", "shared_expert_intermediate_size",
    "expert_ffn_hidden_size", "ffn_hidden_size", "shared_intermediate_size", "d_inner",
    "moe_shared_expert_intermediate_size", "block_ff_dim", "mlp_hidden_size",
    "intermediate_size_mlp", "dense_intermediate_size", "mlp_dim", "inner_dim",
]  # fmt: skip
LAYERS = [
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "num_encoder_layers", "decoder_num_layers",
]  # fmt: skip
HEADS = [
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
]  # fmt: skip
KEY_VALUE_HEADS = [
    "num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num",
]  # fmt: skip
HEAD_WIDTHS = [
    "head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_head_dim",
    "kv_channels", "d_head", "global_head_dim", "index_head_dim", "swa_head_dim",
]  # fmt: skip
EXPERTS = [
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
]  # fmt: skip
EXPERTS_PER_TOKEN = [
    "num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k", "top_k_experts",
]  # fmt: skip
EXPERT_GROUPS = [
    "n_group", "topk_group", "num_shared_experts", "n_shared_experts",
]  # fmt: skip

# every setting that makes a model small, by its name in a config
TINY = {
    **dict.fromkeys(HIDDEN_WIDTHS, WIDTH),
    **dict.fromkeys(INNER_WIDTHS, 2 * WIDTH),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(HEADS, 2),
    **dict.fromkeys(KEY_VALUE_HEADS, 1),
    **dict.fromkeys(HEAD_WIDTHS, 32),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(EXPERTS_PER_TOKEN, 2),
    **dict.fromkeys(EXPERT_GROUPS, 1),
    "first_k_dense_replace": 1,
    # words
    "vocab_size": 320,
    "unpadded_vocab_size": 320,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 64,
    "type_vocab_size": 2,
    # state spaces and recurrences
    "state_size": 16,
    "time_step_rank": 32,
    "mamba_d_state": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_dt_rank": 32,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
    "ssm_state_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_mamba_heads": 4,
    "mamba_headdim": 32,
    "mamba_ngroups": 1,
    "n_groups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    # pictures and sound
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "vision_embed_dim": WIDTH,
    "depth": 2,
    "depths": [1, 1, 1, 1],
    "hidden_sizes": [64, 64, 64, 64],
    "num_labels": 32,
    # tokens
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


def tiny_settings(default: "transformers.PreTrainedConfig", **changes: object) -> dict[str, object]:
    """Arguments that make a config small: every setting of TINY that the default config has, its
    parts included.
    """
    present = default.to_dict()
    present |= {name: present.get(target) for name, target in default.attribute_map.items()}
    settings: dict[str, object] = {
        name: value
        for name, value in TINY.items()
        if name in present
        and isinstance(present[name], (list, tuple, dict)) == isinstance(value, list)
    }
    if "kv_lora_rank" in settings:
        # latent attention knows no groups
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    for name in type(default).sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            settings[name] = {"model_type": part.model_type, **tiny_settings(part)}
    for name, value in changes.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    return settings


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)


def tiny_config(architecture: str) -> "transformers.PreTrainedConfig":
    config_class = getattr(transformers, architecture).config_class
    config = config_class(**tiny_settings(config_class(), **CHANGES.get(architecture, {})))
    config.architectures = [architecture]
    config.dtype = torch.bfloat16
    return config


def tiny_model(architecture: str) -> "transformers.PreTrainedModel":
    """A random bfloat16 model; the same on every call."""
    config = tiny_config(architecture)
    torch.manual_seed(0)
    with default_dtype(torch.bfloat16):  # what a model wants in float32 it asks for, and gets
        model = getattr(transformers, architecture)(config).eval()
    float32 = re.compile("|".join(model._keep_in_fp32_modules_strict or ["$^"]))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and not weight.any():
                # bitsandbytes' CPU code encodes a block of zeros as its CUDA code
                # does not
                weight.normal_(std=0.02)
            if float32.search(name):
                weight.data = weight.data.float()
    return model


def save_tiny(architecture: str, folder: Path) -> Path:
    """A checkpoint of it, in FOLDER/source."""
    source = folder / "source"
    tiny_model(architecture).save_pretrained(source)
    if architecture == "Qwen2_5OmniForConditionalGeneration":
        torch.save({}, source / "spk_dict.pt")  # its voices, which from_pretrained insists on
    return source


def tiny_inputs(model: "transformers.PreTrainedModel") -> dict[str, torch.Tensor]:
    """Something to run a model on: words, a picture or sound, whatever it takes first."""
    generator = torch.Generator().manual_seed(1)
    config = model.config
    words = torch.randint(3, 300, (2, 16), generator=generator)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    main = model.main_input_name
    if main in ("pixel_values", "pixel_values_videos"):
        part = getattr(config, "vision_config", config)
        size = getattr(part, "image_size", 32)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs = {"pixel_values": noise(2, getattr(part, "num_channels", 3), height, width)}
    elif main == "input_features":
        mels = getattr(config, "num_mel_bins", 16)
        inputs = {"input_features": noise(2, mels, 128)}
    elif main == "input_values":
        inputs = {"input_values": noise(2, 4000)}
    else:
        inputs = {main: words}
    parameters = inspect.signature(model.forward).parameters
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = words
    if "input_ids" in parameters and "pixel_values" in inputs and hasattr(config, "text_config"):
        inputs["input_ids"] = words
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs
