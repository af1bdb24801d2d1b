"""The fields of config.json that readers know: each reader lists the fields that it uses and those without effect.

Any other field that is set is refused by name: it may ask for a part that treespec does not
compute, and the head would load and draft nonsense. transformers writes many further fields; those with a
neutral value, and those without effect in a draft head, pass.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from treespec.heads.head import Config

Item = TypeVar("Item")  # a field's value, or a tensor

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
UNKNOWN_FIELD = (
    "treespec does not know this field, and it may change what the head computes; "
    "if its project says that it changes nothing, delete it from config.json"
)
FIELD_REASONS = {  # why treespec refuses fields of parts that its heads do not have
    "quantization_config": "treespec reads heads in floats and in fp8, and this file has no fp8 weight",
    "shift_label": "treespec's DFlash head has no shifted labels",
    "pure_draft_prefix_len": "treespec's DFlash head has no prefix of drafts",
    "attention_sink_bias": "treespec's attention has no sinks",
    "add_swa_attention_sink_bias": "treespec's attention has no sinks",
    "layernorms": "the projects that read these heads put the norms at different places",
    "original_lm_head": "treespec's Medusa heads have output layers of their own",
    "token_map": "treespec's Medusa heads draft all tokens",
    "logit_scale": "treespec does not scale a head's logits",
    "output_multiplier": "treespec does not scale a head's logits",
    "final_logit_softcapping": "treespec does not cap a head's logits",
    "input_embedding_scale": "treespec takes the embedding as the target scales it",
}


@dataclass(frozen=True)
class FieldTable:
    """The fields of a JSON object that a reader knows.

    Attributes:
        used: fields that the reader reads.
        unused: fields without effect, whatever their value.
        only: fields that must be absent, null or one of these values.
        nested: fields that hold an object, or a list of objects, each with a table.
    """

    used: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    nested: Mapping[str, "FieldTable"] = field(default_factory=dict)

    def extend(
        self,
        used: Iterable[str] = (),
        unused: Iterable[str] = (),
        only: Mapping[str, tuple[Any, ...]] = NO_FIELDS,
        nested: Mapping[str, "FieldTable"] = NO_FIELDS,
    ) -> "FieldTable":
        """A copy of this table with further fields."""
        return FieldTable(
            self.used | set(used),
            self.unused | set(unused),
            {**self.only, **only},
            {**self.nested, **nested},
        )

    def check(self, config: Config, path: str = "") -> None:
        """Raises ValueError for a field that is set but not in the table. path: prefix of its name in the message."""
        for name, value in config.items():
            field_path = f"{path}{name}"
            if name in self.only:
                check_value(field_path, name, value, self.only[name])
            elif name in self.nested:
                self.check_nested(name, value, field_path)
            elif name not in self.used | self.unused and is_set(value):
                raise ValueError(
                    f"{field_path} is {value!r}: {FIELD_REASONS.get(name, UNKNOWN_FIELD)}"
                )

    def check_nested(self, name: str, value: object, path: str) -> None:
        """Check a nested object, or each object of a list. An object may be null."""
        parts = [value]
        if isinstance(value, list):
            parts = value
        elif not value:
            parts = [{}]
        for part in parts:
            self.nested[name].check(as_object(part, path), f"{path}.")


def check_value(path: str, name: str, value: object, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError unless a field's value is null or allowed."""
    if value is not None and value not in allowed:
        expected = " or ".join(map(repr, allowed))
        reason = FIELD_REASONS.get(name, f"treespec reads {expected} there")
        raise ValueError(f"{path} is {value!r}: {reason}")


def as_object(value: object, path: str) -> Config:
    """Return a JSON object as a dict. Raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{path} is {value!r}, must be an object")
    return value


def get_object(config: Config, name: str) -> Config:
    """The object in a field; an empty one if the field is missing, null or false."""
    value = config.get(name)
    if not value:
        return {}
    return as_object(value, name)


def is_set(value: object) -> bool:
    """Whether a field is set: neither null nor false, 0 or empty."""
    return bool(value)


def split_names(text: str) -> frozenset[str]:
    """Split a text of names at white space."""
    return frozenset(text.split())


def drop_names(items: Mapping[str, Item], names: Collection[str]) -> dict[str, Item]:
    """Copy fields or tensors, without those in `names`."""
    return {name: value for name, value in items.items() if name not in names}


def select_names(items: Mapping[str, Item], names: Iterable[str]) -> dict[str, Item]:
    """Copy the fields or tensors in `names` that exist, in the order of `names`."""
    return {name: items[name] for name in names if name in items}


# Fields of transformers' configs without effect in a draft head.
NAME_FIELDS = split_names("""
    architectures auto_map model_type _name_or_path name_or_path transformers_version
    torch_dtype dtype base_model_name_or_path version target_model_type target_tokens checksum
    """)
TOKEN_FIELDS = split_names("""
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id decoder_start_token_id
    bad_words_ids forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
    """)
GENERATION_FIELDS = split_names("""
    do_sample early_stopping max_length min_length temperature top_k top_p typical_p
    repetition_penalty length_penalty diversity_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size exponential_decay_length_penalty num_beams num_beam_groups
    num_return_sequences remove_invalid_values output_scores return_dict_in_generate use_cache
    """)
OUTPUT_FIELDS = split_names("""
    output_attentions output_hidden_states return_dict torchscript use_bfloat16 tf_legacy_loss
    chunk_size_feed_forward id2label label2id problem_type finetuning_task task_specific_params
    tokenizer_class prefix has_no_defaults_at_init is_decoder
    """)
# Fields about training, kernels, and the number of tokens that an engine drafts.
TRAINING_FIELDS = split_names("""
    initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop dropout
    pretraining_tp gradient_checkpointing _attn_implementation attn_implementation
    _attn_implementation_autoset _flash_attn_2_enabled embed_requires_grad num_anchors
    max_anchors loss_decay_gamma num_lookahead_tokens num_speculative_tokens
    """)
# Fields copied from a target with experts. A head with experts has other tensors, and these are refused.
EXPERT_FIELDS = split_names("""
    decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts
    num_experts_per_tok num_local_experts experts_per_token output_router_logits
    router_aux_loss_coef router_jitter_noise shared_expert_intermediate_size
    """)
PLAIN_TABLE = FieldTable(
    unused=NAME_FIELDS
    | TOKEN_FIELDS
    | GENERATION_FIELDS
    | OUTPUT_FIELDS
    | TRAINING_FIELDS
    | EXPERT_FIELDS,
    only={"logit_scale": (1,), "is_encoder_decoder": (False,)},
)

LLAMA_TABLE = PLAIN_TABLE.extend(
    used=split_names("""
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    vocab_size hidden_act rms_norm_eps max_position_embeddings rope_theta rope_scaling
    rope_parameters partial_rotary_factor attention_bias qkv_bias embed_scale
    """),
    unused=(
        "max_sequence_length",
        "max_window_layers",
        # EAGLE-1 and DFlash have the target's output in any case; EAGLE-3's reader uses it.
        "tie_word_embeddings",
        "sliding_window",  # without layer_types it has no effect, in vLLM and here
    ),
    only={"mlp_bias": (False,)},
)
ONE_LAYER_TABLE = LLAMA_TABLE.extend(  # heads with one layer that sees all positions
    only={"use_sliding_window": (False,), "layer_types": (["full_attention"], [])},
)
WINDOW_FIELDS = ("layer_types", "sliding_window", "use_sliding_window")
NORM_FIELDS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_TOKEN_FIELDS = (
    "mask_token_id",
    "ptd_token_id",
    "pard_token",
)  # names of the mask token, in vLLM's order

EAGLE_PROJECTS_TABLE = ONE_LAYER_TABLE.extend(
    used=("bias", "own_output", "draft_vocab_size", "truncated_vocab_size", "eagle_fc_bias"),
    only={"is_causal": (True,)},
)
# vLLM's layer; a field outside counts.
EAGLE_NESTED_TABLE = EAGLE_PROJECTS_TABLE.extend(nested={"model": EAGLE_PROJECTS_TABLE})
EAGLE_TABLE = FieldTable(  # with treespec's own window
    EAGLE_PROJECTS_TABLE.used.union(WINDOW_FIELDS),
    EAGLE_PROJECTS_TABLE.unused,
    drop_names(EAGLE_PROJECTS_TABLE.only, WINDOW_FIELDS),
)
EAGLE_CONFIG_TABLE = (
    FieldTable(  # SGLang's, TensorRT-LLM's and ModelOpt's, within an EAGLE-3 head's
        used=frozenset((LAYER_IDS, "norm_before_fc", "return_hidden_post_norm", "use_aux_norm")),
        unused=frozenset(("parallel_draft_heads_num_layers",)),
        only={
            "use_aux_hidden_state": (True,),
            "use_last_layernorm": (True,),
            "use_input_layernorm_in_first_layer": (True,),
            "next_layer_regular": (True,),
            "use_mtp_layernorm": (False,),
            "parallel_draft_step": (0, 1),
        },
    )
)
EAGLE3_BASE_TABLE = LLAMA_TABLE.extend(
    used=split_names("""
    draft_vocab_size target_hidden_size num_aux_hidden_states qk_norm own_output
    tie_word_embeddings return_hidden_post_norm use_aux_norm
    """).union(NORM_FIELDS, WINDOW_FIELDS, [LAYER_IDS]),
    only={"is_causal": (True,), "bias": (False,)},
    nested={"eagle_config": EAGLE_CONFIG_TABLE},
)
LATENT_FIELDS = split_names("q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim")
EAGLE3_TABLE = EAGLE3_BASE_TABLE.extend(
    used=LATENT_FIELDS,
    unused=("first_k_dense_replace", "moe_layer_freq", "n_routed_experts", "n_shared_experts"),
    only={"parallel_drafting": (False,), "rope_interleave": (True,)},
)
CANDIDATE_COUNT = "num_candidates"
EAGLE4_TABLE = EAGLE3_TABLE.extend(
    used=(CANDIDATE_COUNT,),
    nested={"candidate_head": FieldTable(used=frozenset(("rank", CANDIDATE_COUNT)))},
)
PROPOSAL_TABLE = FieldTable(
    used=frozenset(("speculative_tokens",)),
    unused=split_names(
        "proposal_type verifier_accept_k accept_tolerance temperature speculative_tokens_per_step"
    ),
)
VERIFIER_TABLE = (
    FieldTable(  # the target that a head was made for: its sizes are checked against the real one
        unused=split_names("""
    name_or_path architectures model_type hidden_size intermediate_size vocab_size
    max_position_embeddings bos_token_id eos_token_id
    """)
    )
)
SPECULATORS_CONFIG_TABLE = FieldTable(
    unused=frozenset(("algorithm", "default_proposal_method")),
    nested={"proposal_methods": PROPOSAL_TABLE, "verifier": VERIFIER_TABLE},
)
P_EAGLE_TABLE = EAGLE3_BASE_TABLE.extend(
    used=frozenset(("levels", "parallel_drafting")).union(MASK_TOKEN_FIELDS),
    nested={"speculators_config": SPECULATORS_CONFIG_TABLE},
)
SPECULATORS_TABLE = PLAIN_TABLE.extend(  # the top level; the layer is nested
    used=("draft_vocab_size", "target_hidden_size"),
    unused=("speculators_version", "tie_word_embeddings"),
    nested={"speculators_config": SPECULATORS_CONFIG_TABLE},
)
SPECULATORS_MTP_TABLE = (
    PLAIN_TABLE.extend(  # of a layer that is the target's, beside its own config
        used=("num_nextn_predict_layers",),
        unused=("speculators_version", "tie_word_embeddings"),
        only={"speculators_model_type": ("mtp",)},
        nested={"speculators_config": SPECULATORS_CONFIG_TABLE},
    )
)
SPECULATORS_LAYER_TABLE = LLAMA_TABLE.extend(used=WINDOW_FIELDS)
SPECULATORS_EAGLE_TABLE = SPECULATORS_TABLE.extend(
    used=("fusion_bias",),
    only={
        "speculators_model_type": ("eagle",),
        "layernorms": (False,),
        "transformer_layer_architecture": ("LlamaDecoderLayer",),
    },
    nested={"transformer_layer_config": ONE_LAYER_TABLE},
)
SPECULATORS_EAGLE3_TABLE = SPECULATORS_TABLE.extend(
    used=frozenset(NORM_FIELDS).union([LAYER_IDS]),
    only={"speculators_model_type": ("eagle3",)},
    nested={"transformer_layer_config": SPECULATORS_LAYER_TABLE},
)
SPECULATORS_P_EAGLE_TABLE = SPECULATORS_EAGLE3_TABLE.extend(
    used=("mask_token_id",), only={"speculators_model_type": ("peagle",)}
)
DFLASH_LAYER_IDS = "aux_hidden_state_layer_ids"
CAUSAL_FIELDS = ("is_causal", "sliding_window_non_causal")
SPECULATORS_DFLASH_TABLE = SPECULATORS_TABLE.extend(
    used=split_names("mask_token_id sample_from_anchor block_size").union(
        CAUSAL_FIELDS, [DFLASH_LAYER_IDS]
    ),
    only={"projector_type": ("dflash",), "speculators_model_type": ("dflash",)},
    nested={"transformer_layer_config": SPECULATORS_LAYER_TABLE},
)
DFLASH_CONFIG_TABLE = FieldTable(  # z-lab's, SpecForge's, ModelOpt's and JetSpec's
    used=split_names("""
    block_size mask_token_id target_layer_ids target_hidden_size use_swa swa_window_size causal
    causal_head sample_from_anchor
    """),
    only={
        "projector_type": ("dflash",),
        "attention_mode": ("gqa",),
        "is_neox_style": (True,),
    },
)
DFLASH_TABLE = LLAMA_TABLE.extend(
    used=split_names("""
    block_size mask_token_id sample_from_anchor target_hidden_size draft_vocab_size own_output
    causal qk_norm
    """).union(WINDOW_FIELDS, CAUSAL_FIELDS, [DFLASH_LAYER_IDS]),
    unused=("num_target_layers",),
    only={"projector_type": ("dflash",), "is_neox_style": (True,)},
    nested={"dflash_config": DFLASH_CONFIG_TABLE},
)
MEDUSA_TABLE = PLAIN_TABLE.extend(
    # Heads that were saved out of a whole model have its fields; they are no part of the heads.
    unused=LLAMA_TABLE.used | LLAMA_TABLE.unused,
).extend(
    used=split_names("""
    medusa_num_heads medusa_num_layers hidden_size vocab_size num_heads num_hidden_layers
    medusa_fc_bias truncated_vocab_size
    """),
    unused=("max_paths", "topk", "medusa_choices"),
)
HYDRA_TABLE = PLAIN_TABLE.extend(
    used=split_names("hydra_num_heads hydra_num_layers hydra_head_arch hidden_size vocab_size"),
    only={"grounded_heads": (True,), "hidden_state_offset": (0,)},
)
HYDRA_PLUS_TABLE = ONE_LAYER_TABLE.extend(HYDRA_TABLE.used, HYDRA_TABLE.unused, HYDRA_TABLE.only)
