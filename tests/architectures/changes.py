"""Lists the settings in which single architectures must differ from the sizes of tiny.py."""

PLAIN_ROPE = {"rope_scaling": {"rope_type": "default"}}
MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
}
OLD_MROPE = {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 6, 6]}}
"""As transformers 4 spells it, which 5 also reads."""

RESNET_CONFIG = {
    "model_type": "resnet",
    "hidden_sizes": [16, 16, 16, 16],
    "embedding_size": 16,
    "out_features": ["stage4"],
}
RESNET = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": RESNET_CONFIG,
}
MIMI = {
    "upsample_groups": 64,
    "codebook_dim": 64,
    "vector_quantization_hidden_dimension": 64,
    "num_filters": 8,
}

CHANGES: dict[str, dict[str, object]] = {
    "GPTJForCausalLM": {"rotary_dim": 32},
    "CodeGenForCausalLM": {"rotary_dim": 16, "n_head": 4, "num_attention_heads": 4},
    "Qwen2VLForConditionalGeneration": {"text_config": MROPE},
    "Qwen2_5_VLForConditionalGeneration": {"text_config": MROPE},
    "Glm4vForConditionalGeneration": {"text_config": MROPE},
    "BambaForCausalLM": {"mamba_n_heads": 32, "mamba_d_head": 4},
    "FalconH1ForCausalLM": {"mamba_n_heads": 32, "mamba_d_head": 4},
    "NemotronHForCausalLM": {"mamba_num_heads": 32, "mamba_head_dim": 4},
    "BltForCausalLM": {"encoder_hash_byte_group_vocab": 320},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 4, "IMGIMGA": 5}},
    "CohereCompassForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "ConditionalDetrForObjectDetection": RESNET,
    "Cosmos3EdgeForConditionalGeneration": {"text_config": MROPE},
    "CsmForConditionalGeneration": {"codec_config": MIMI},
    "DFineForObjectDetection": {
        "backbone_config": {
            "model_type": "hgnet_v2",
            "out_features": ["stage2", "stage3", "stage4"],
        },
        "encoder_in_channels": [512, 1024, 2048],
    },
    "DabDetrForObjectDetection": RESNET,
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "ffn_hidden_size": 128,
            "hidden_size": 64,
        },
    },
    "DeepseekOcr2ForConditionalGeneration": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {
            "encoder_config": {
                "num_key_value_heads": 1,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "sam_config": {
                "hidden_size": 64,
                "num_attention_heads": 2,
                "output_channels": 64,
                "downsample_channels": [64, 64],
                "global_attn_indexes": [1],
                "mlp_dim": 128,
                "window_size": 2,
                "num_hidden_layers": 2,
            },
        },
    },
    "DeformableDetrForObjectDetection": {
        **RESNET,
        "backbone_config": {**RESNET_CONFIG, "out_features": ["stage2", "stage3", "stage4"]},
    },
    "DetrForObjectDetection": RESNET,
    "DiffLlamaForCausalLM": {"num_key_value_heads": 2, "num_attention_heads": 4},
    "DonutSwinForImageClassification": {"depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "Emu3ForConditionalGeneration": {
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1]},
        "vocabulary_map": {"<image>": 4},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 6, 4],
            },
            "moe_num_experts": 4,
        }
    },
    "EsmcForMaskedLM": {"num_key_value_heads": 2},
    "FunAsrNanoForConditionalGeneration": {"adaptor_config": {"intermediate_size": 16}},
    "GLPNForDepthEstimation": {"num_attention_heads": [1, 2, 2, 2]},
    "GPTNeoForCausalLM": {
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"],
    },
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "activation_sparsity_pattern": [0.0, 0.0, 0.0, 0.0],
        "intermediate_size": [128, 128, 128, 128],
    },
    "Glm5NextForConditionalGeneration": {
        "text_config": {
            "qk_rope_head_dim": 0,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "layer_types": None,
        }
    },
    "Granite4VisionForConditionalGeneration": {
        "deepstack_layer_map": [[0, 0]],
        "downsample_rate": "1/2",
        "qformer_config": {"num_hidden_layers": 1},
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "JanusForConditionalGeneration": {
        "vq_config": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1]}
    },
    "KyutaiSpeechToTextForConditionalGeneration": {
        "pad_token_id": 3,
        "audio_pad_token_id": 69,
        "codec_config": MIMI,
        "codebook_vocab_size": 64,
    },
    "LevitForImageClassification": {
        "hidden_sizes": [64, 64, 64],
        "depths": [1, 1, 1],
        "num_attention_heads": [2, 2, 2],
        "key_dim": [32, 32, 32],
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "LukeForMaskedLM": {"entity_vocab_size": 320, "entity_emb_size": 64},
    "LwDetrForObjectDetection": {
        "backbone_config": {
            "model_type": "lw_detr_vit",
            "num_windows": 4,
            "image_size": 64,
            "patch_size": 8,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "window_block_indices": [0],
            "out_indices": [1, 2],
        },
        "projector_scale_factors": [
            1.0
        ],  # of none, which is the default, there are weights without elements
    },
    "Mamba2ForCausalLM": {
        "num_heads": 4,
        "head_dim": 32,
        "hidden_size": 64,
        "expand": 2,
        "n_groups": 1,
    },
    "MaskFormerForInstanceSegmentation": {
        "backbone_config": {
            "model_type": "swin",
            "depths": [1, 1, 1, 1],
            "num_heads": [2, 2, 2, 2],
            "embed_dim": 64,
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
            "image_size": 64,
        }
    },
    "MllamaForCausalLM": PLAIN_ROPE,
    "MllamaForConditionalGeneration": {"text_config": PLAIN_ROPE},
    "MllamaTextModel": PLAIN_ROPE,
    "Molmo2ForConditionalGeneration": {
        "adapter_config": {"vision_feature_layer": [1, 0], "vit_layers": [1, 0]}
    },
    "MoonshineStreamingForConditionalGeneration": {"num_key_value_heads": 2},
    "MuseSparkForConditionalGeneration": {
        "audio_config": {
            "num_hidden_layers": 2,
            "patch_sizes": [4, 4],
            "hidden_sizes": [64, 64],
            "depths": [1, 1],
            "out_hidden_size": 64,
        },
        "projector_hidden_size": 64,
    },
    "NemotronH_Omni_Reasoning_V3": {"vision_config": {"video_temporal_patch_size": 2}},
    "PerceiverForMaskedLM": {
        "num_latents": 16,
        "d_latents": 64,
        "d_model": 64,
        "num_self_attends_per_block": 2,
        "num_cross_attention_heads": 2,
        "num_self_attention_heads": 2,
    },
    "PocketTTSForConditionalGeneration": {"flow_head_config": {"condition_dim": 64}},
    "PvtForImageClassification": {"num_attention_heads": [1, 2, 2, 2]},
    "PvtV2ForImageClassification": {"num_attention_heads": [1, 2, 2, 2]},
    "Qwen2_5OmniForConditionalGeneration": {
        "token2wav_config": {
            "bigvgan_config": {
                "model_type": "qwen2_5_omni_bigvgan",
                "upsample_initial_channel": 64,
                "upsample_rates": [2, 2],
                "upsample_kernel_sizes": [4, 4],
            }
        }
    },
    "Qwen3VLForConditionalGeneration": {"text_config": OLD_MROPE},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": OLD_MROPE},
    "Qwen3VLMoeTextModel": OLD_MROPE,
    "Qwen3VLTextModel": OLD_MROPE,
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"text_config": OLD_MROPE},
    "ReformerForMaskedLM": {
        "is_decoder": False,
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [8, 16],
    },
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [8, 16],
    },
    "SwinForImageClassification": {"num_heads": [2, 2, 2, 2]},
    "Swinv2ForImageClassification": {"depths": [1, 1], "num_heads": [2, 2], "window_size": 2},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "TableTransformerForObjectDetection": RESNET,
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "mamba_headdim": 32,
        "n_mamba_heads": 4,
        "num_mem_blocks": 1,
        "adapter_rank": 32,
    },
    "ZambaForCausalLM": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 64,
        "num_attention_heads": 2,
        "mamba_dt_rank": 32,
        "n_mamba_heads": 2,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
