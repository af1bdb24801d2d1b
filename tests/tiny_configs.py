"""A configuration of a few thousand weights for every causal language model that transformers has."""

import inspect
from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

SIZES: dict[int, str] = {  # every field of that name, in whatever config it stands
    1: "n_group topk_group mamba_n_groups mamba_ngroups n_groups n_shared_experts num_shared_experts bos_token_id "
    "n_langs",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok top_k_experts moe_topk moe_k "
    "index_n_heads linear_num_key_heads linear_num_value_heads eos_token_id type_vocab_size encoder_layers "
    "num_encoder_layers depth num_global_layers",
    3: "num_hidden_layers n_layer num_layers n_layers decoder_layers num_decoder_layers",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads mamba_n_heads "
    "num_decoder_attention_heads num_encoder_attention_heads swa_num_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts mamba_num_heads linear_num_heads time_step_rank mamba_dt_rank rotary_dim "
    "patch_size attention_heads",
    6: "sliding_window sliding_window_size attention_window_size attention_chunk_size",
    8: "head_dim kv_channels d_head dim_head attention_head_size attention_head_dim swa_head_dim kv_lora_rank "
    "q_lora_rank o_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state ssm_state_size state_size "
    "linear_key_head_dim linear_value_head_dim linear_head_dim hidden_size_per_layer_input image_size "
    "audio_soft_tokens_per_image",
    16: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size qk_head_dim "
    "expert_ffn_hidden_size index_head_dim mamba_d_head mamba_head_dim",
    32: "hidden_size d_model n_embd emb_dim dim_model embedding_size word_embed_proj_dim lru_width embed_dim "
    "attention_hidden_size audio_hidden_size output_dim out_hidden_size vision_output_dim output_channels",
    48: "intermediate_size ffn_dim n_inner ffn_hidden_size dff d_inner decoder_ffn_dim encoder_ffn_dim dim_ff "
    "feed_forward_size intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size mlp_dim "
    "shared_intermediate_size",
    64: "vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size mamba_d_ssm",
    128: "max_position_embeddings n_positions max_seq_len n_ctx context_length max_target_positions "
    "max_source_positions",
    0: "pad_token_id num_kv_shared_layers",
}
TINY = {name: size for size, fields in SIZES.items() for name in fields.split()}
ATTENTIONS = ("full_attention", "sliding_attention")
SIGLIP = {"model_type": "siglip_vision_model"} | TINY
OWN: dict[str, dict[str, Any]] = {}
DELTA = "bailing_hybrid granitemoehybrid kimi_linear qwen3_5_text qwen3_5_moe_text qwen3_next"
INDEXED = "axk2 deepseek_v32 glm_moe_dsa hy_v4"  # their attention sees the columns that an index chooses
EXPANDED = "axk1 deepseek_v2 deepseek_v3 dots3_note_text glm4_moe_lite minicpm3 youtu"  # keys and values by query head
OWN |= {name: {"num_key_value_heads": 4} for name in EXPANDED.split()}
OWN |= {name: {"num_key_value_heads": 4, "index_topk": 32} for name in INDEXED.split()}
OWN |= {name: {"layer_types": ["linear_attention", "full_attention", "linear_attention"]} for name in DELTA.split()}
OWN["kimi_linear"]["num_key_value_heads"] = OWN["bailing_hybrid"]["num_key_value_heads"] = 4
OWN |= {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (16, 16)},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "zamba": {"num_hidden_layers": 12, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3": {"vision_config": SIGLIP},
    "fuyu": {"text_config": {"model_type": "persimmon"} | TINY, "image_size": 8, "patch_size": 4},
    "got_ocr2": {"text_config": {"model_type": "qwen2"} | TINY},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"} | TINY},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text"} | TINY | {"hidden_size_per_layer_input": 0}},
    "cohere_compass_text": {
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ATTENTIONS}
    },
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 32,
        "indexer_compress_ratio": 4,
    },
    "blt": {"encoder_hash_byte_group_vocab": 64},
}


def tiny(kind, own=None):
    """A small config of a class, and of the classes within it."""
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {})}
    values: dict[str, Any] = {name: size for name, size in TINY.items() if name in known}
    for name, inner in kind.sub_configs.items():
        if inner is not AutoConfig:
            values[name] = tiny(inner, OWN.get(inner.model_type)).to_dict()
    return kind(**values | OWN.get(kind.model_type, {}) | (own or {}))


MODELS = {next(name for name in NAMES if CONFIG_MAPPING[name] is kind): kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
