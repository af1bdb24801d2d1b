"""Directories of EAGLE heads and MTP layers as their authors write them, at tiny size."""

HIDDEN, VOCAB, HEADS, GROUPS, WIDTH, INNER, RANK = 32, 64, 4, 2, 8, 48, 6
AUX = [2, 4, 6]  # the aux layers, as vLLM counts them
LAYER_IDS_KEY = "eagle_aux_hidden_state_layer_ids"


def list_attention(width, norms=False, biases=False):
    shapes = {
        "self_attn.q_proj.weight": (HEADS * WIDTH, width),
        "self_attn.k_proj.weight": (GROUPS * WIDTH, width),
        "self_attn.v_proj.weight": (GROUPS * WIDTH, width),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * WIDTH),
    }
    if norms:
        shapes |= {f"self_attn.{part}_norm.weight": (WIDTH,) for part in "qk"}
    if biases:
        shapes |= {"self_attn.q_proj.bias": (HEADS * WIDTH,)}
        shapes |= {f"self_attn.{part}_proj.bias": (GROUPS * WIDTH,) for part in "kv"}
    return shapes


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10}


def list_latent_attention(query_rank):
    shapes = {
        "self_attn.kv_a_proj_with_mqa.weight": (8 + 4, 2 * HIDDEN),
        "self_attn.kv_a_layernorm.weight": (8,),
        "self_attn.kv_b_proj.weight": (HEADS * (8 + 10), 8),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * 10),
    }
    if query_rank is None:
        return shapes | {"self_attn.q_proj.weight": (HEADS * 12, 2 * HIDDEN)}
    return shapes | {
        "self_attn.q_a_proj.weight": (query_rank, 2 * HIDDEN),
        "self_attn.q_a_layernorm.weight": (query_rank,),
        "self_attn.q_b_proj.weight": (HEADS * 12, query_rank),
    }


def list_layer(attention, norms):
    shapes = attention | {f"{name}.weight": (HIDDEN,) for name in norms}
    for part in ("gate", "up"):
        shapes[f"mlp.{part}_proj.weight"] = (INNER, HIDDEN)
    return shapes | {"mlp.down_proj.weight": (HIDDEN, INNER)}


def list_eagle(attention, fc_norm=False):
    layer = list_layer(attention, ["hidden_norm", "input_layernorm", "post_attention_layernorm"])
    shapes = {f"layers.0.{name}": shape for name, shape in layer.items()}
    if fc_norm:
        shapes |= {f"fc_norm.{number}.weight": (HIDDEN,) for number in range(3)}
    return shapes | {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCAB, HIDDEN),
        "embed_tokens.weight": (VOCAB, HIDDEN),
    }


LLAMA = {
    "attention_bias": False,
    "head_dim": WIDTH,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 128,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_hidden_layers": 1,
    "num_key_value_heads": GROUPS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
# As the config.json of published EAGLE-3 heads for Kimi K2.5, at tiny size.
KIMI = LLAMA | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "draft_vocab_size": VOCAB,
    "dtype": "float64",
    "eagle_config": {LAYER_IDS_KEY: [number - 1 for number in AUX], "use_aux_hidden_state": True},
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
    "initializer_range": 0.02,
    "max_window_layers": 48,
    "model_type": "kimi_k2",
    "moe_layer_freq": 1,
    "num_key_value_heads": HEADS,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "sliding_window": None,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    **LATENT,
}
YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
    "type": "yarn",
}
# As NeMo AutoModel's pages list what its export writes.
EAGLE4 = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle4"],
    LAYER_IDS_KEY: AUX,
    "fc_norm": True,
    "norm_output": True,
    "norm_before_residual": False,
    "sliding_window": 4,
    "candidate_head": {"rank": RANK, "num_candidates": 7},
}
LOW_RANK = {"efficient_lm_head.weight": (VOCAB, RANK), "efficient_lm_head_down_proj.weight": (RANK, HIDDEN)}
EAGLES = {  # name: (config.json, shapes)
    "latent": (KIMI, list_eagle(list_latent_attention(16))),
    "latent-yarn": (KIMI | {"rope_scaling": YARN}, list_eagle(list_latent_attention(16))),
    "latent-yarn-scaled": (
        KIMI | {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}},
        list_eagle(list_latent_attention(16)),
    ),
    "latent-direct-queries": (KIMI | {"q_lora_rank": None}, list_eagle(list_latent_attention(None))),
    "latent-normed-residual": (KIMI | {"norm_before_residual": True}, list_eagle(list_latent_attention(16))),
    "eagle4": (EAGLE4, list_eagle(list_attention(2 * HIDDEN), fc_norm=True) | LOW_RANK),
    "eagle4-normed-residual": (
        EAGLE4 | {"norm_before_residual": True},
        list_eagle(list_attention(2 * HIDDEN), fc_norm=True) | LOW_RANK,
    ),
    "eagle4-plain-states": (
        EAGLE4 | {"norm_output": False, "fc_norm": False},
        list_eagle(list_attention(2 * HIDDEN)) | LOW_RANK,
    ),
}
MTP_LAYER = LLAMA | {"rms_norm_eps": 1e-6, "rope_theta": 10000.0}


def list_mtp(norms, biases):
    names = ["input_layernorm", "post_attention_layernorm", "token_layernorm", "hidden_layernorm", "final_layernorm"]
    return list_layer(list_attention(HIDDEN, norms, biases), names) | {"input_proj.weight": (HIDDEN, 2 * HIDDEN)}


SPECULATORS_MTP = {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    "speculators_version": "0.9.0",
    "speculators_config": {
        "algorithm": "mtp",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/model", "architectures": ["Qwen3ForCausalLM"]},
    },
    "num_nextn_predict_layers": 1,
    "transformers_version": "5.2.0",
    "dtype": "float64",
}
