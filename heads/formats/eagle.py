"""Heads of EAGLE's family: SafeAILab/EAGLE, SpecForge, SGLang, vLLM, speculators, ModelOpt, NeMo AutoModel.

Formats number the aux layers in two ways. Aux layer k stands for the input of layer k, which is
transformers' hidden_states[k]. vLLM, speculators and treespec name the layer that it enters; SGLang,
z-lab and SpecForge's DFlash name the layer that it leaves. In a target of five layers:

    hidden_states                       0   1   2   3   4   5
    eagle_aux_hidden_state_layer_ids    0   1   2   3   4   5   entered: vLLM, … (L: what the last layer gives)
    eagle_config. …_layer_ids               0   1   2   3   4   left: SGLang
"""

import torch

from treespec.heads.eagle3 import AUX_LAYERS
from treespec.heads.folder import p_eagle_levels
from treespec.heads.formats import fields
from treespec.heads.formats.engines import IDS, QWEN3, from_sglang, renamed
from treespec.heads.formats.layers import (
    VERIFIER_TENSORS,
    as_qwen3,
    check_window,
    count_layers,
    derive_biases,
    derive_sizes,
    flatten_speculators,
)
from treespec.heads.formats.rotary import read_rotary
from treespec.heads.formats.vocabulary import OUTPUT_TENSOR, derive_vocabulary
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.registry import KIND, P_EAGLE

EAGLE = "eagle"  # model_type of a head whose own output layer would make it look like EAGLE-3
MASK_HIDDEN = "mask_hidden"
FIRST_LAYER = "midlayer"  # EAGLE-3's first layer, in treespec
TENSOR_NAMES = (  # of published tensors: treespec's
    (r"^layers\.0\.", f"{FIRST_LAYER}."),
    (r"^aux_norm_low\.", "fc_norm.0."),  # three older ones, which SGLang renames too
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm."),  # SGLang's, of later layers
)
SPECULATORS_NAMES = (  # of speculators' EAGLE-1
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
)
NORM_FLAGS = {  # at the top, or in eagle_config, as vLLM and TensorRT-LLM read it: treespec's
    "norm_before_fc": "norm_before_fc",
    "return_hidden_post_norm": "norm_output",
    "use_aux_norm": "fc_norm",
}
NORM_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def read_eagle(config: Config, tensors: Tensors) -> Stored:
    """EAGLE-1, EAGLE-2 and HASS: SafeAILab's, SGLang's, vLLM's (its nested config too) and speculators'.

    The file tells whether `fc` and the queries have biases, and whether the head has an output
    layer of its own.
    """
    # 1. The layer's fields at the top, and SafeAILab's names of tensors.
    if KIND in config:
        fields.SPECULATORS_EAGLE_TABLE.check(config)
        config = dict(config["transformer_layer_config"])
        tensors = renamed(tensors, *SPECULATORS_NAMES)
    elif isinstance(config.get("model"), dict):
        fields.EAGLE_NESTED_TABLE.check(config)
        outside = {
            name: value for name, value in config.items() if name not in ("model", "model_type")
        }
        config = config["model"] | outside
    else:
        fields.EAGLE_TABLE.check(config)
    config = read_rotary(config)
    check_fusion(tensors)

    # 2. What the tensors tell.
    biased = config.get("bias") or config.get("eagle_fc_bias")
    if "fc.bias" in tensors:
        config = config if config.get("bias", True) else config | {"bias": True}
    elif biased:
        raise ValueError("bias is true, and the file has no fc.bias: fetch the whole repository")
    else:
        config = config | {"bias": False}
    config = derive_biases(config, tensors, "layers.0")
    config = derive_sizes(config, tensors, "layers.0")
    config, tensors = derive_vocabulary(*read_token_map(config, tensors))
    if OUTPUT_TENSOR not in tensors:
        return config, tensors
    return config | {"own_output": True, "model_type": EAGLE}, tensors


def check_fusion(tensors: Tensors) -> None:
    """Raises ValueError unless `fc` takes an embedding and a feature, as only EAGLE-1's does."""
    shape = [*tensors["fc.weight"].shape]
    if len(shape) != 2 or shape[1] != 2 * shape[0]:
        raise ValueError(
            f"fc.weight is {shape}, and EAGLE-1's is [H, 2 H]: it is of an architecture that treespec does not know"
        )


def read_token_map(config: Config, tensors: Tensors) -> Stored:
    """vLLM's `token_map` of the tokens that a head drafts, as d2t. Without `truncated_vocab_size` it means nothing."""
    kept = {name: value for name, value in tensors.items() if name != "token_map"}
    drafted = config.get("truncated_vocab_size") or 0
    if not 0 < drafted < config.get("vocab_size", 0):
        return config, kept
    config = config | {"draft_vocab_size": drafted}
    if "token_map" in tensors:
        named = tensors["token_map"].long()
        kept["d2t"] = named - torch.arange(len(named))
        if OUTPUT_TENSOR in kept and len(kept[OUTPUT_TENSOR]) > len(named):
            kept[OUTPUT_TENSOR] = kept[OUTPUT_TENSOR][named]
    return config, kept


def read_eagle3(config: Config, tensors: Tensors) -> Stored:
    """EAGLE-3 and 3.1: layers.0 is midlayer, SGLang's layer ids are translated, and what follows is derived.

    A layer is Qwen3's by its architecture or its tensors.
    """
    return read_features(config, tensors, fields.EAGLE3_TABLE, fields.SPECULATORS_EAGLE3_TABLE)


def read_p_eagle(config: Config, tensors: Tensors) -> Stored:
    """As EAGLE-3's, with the mask token and its learnt feature."""
    changes: Config = {"model_type": P_EAGLE, "levels": p_eagle_levels(config)}
    masks = [config[name] for name in fields.MASK_TOKEN_FIELDS if config.get(name) is not None]
    if masks:
        changes["mask_token_id"] = masks[0]
    config, tensors = read_features(
        config, tensors, fields.P_EAGLE_TABLE, fields.SPECULATORS_P_EAGLE_TABLE
    )
    if MASK_HIDDEN in tensors:
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].reshape(1, 1, -1)
    return config | changes, tensors


def read_features(
    config: Config, tensors: Tensors, table: fields.FieldTable, nested: fields.FieldTable
) -> Stored:
    """A head over aux hidden states. table: its fields. nested: those of speculators' wrapper."""
    (nested if KIND in config else table).check(config)
    config = flatten_eagle_config(flatten_speculators(config, norm_before_residual=True))
    config = read_rotary(config)
    tensors = {name: value for name, value in tensors.items() if name not in VERIFIER_TENSORS}
    tensors = renamed(tensors, *TENSOR_NAMES)
    if QWEN3 in (config.get("architectures") or ()):
        config = as_qwen3(config)
    config = derive_norms(config, tensors)
    config = derive_biases(config, tensors, FIRST_LAYER)
    config = derive_sizes(config, tensors, FIRST_LAYER)
    config = count_layers(config, tensors, before=1)
    check_window(config)
    tied = bool(config.get("tie_word_embeddings"))
    config, tensors = derive_vocabulary(config, tensors, tied)
    return (config if OUTPUT_TENSOR in tensors else config | {"own_output": False}), tensors


def flatten_eagle_config(config: Config) -> Config:
    """The config with the fields of `eagle_config` at the top, and SGLang's layer ids as aux layers.

    Raises ValueError for another number of aux layers than `num_aux_hidden_states`.
    """
    flat = {name: value for name, value in config.items() if name != "eagle_config"}
    inner = config.get("eagle_config") or {}
    for name, flag in NORM_FLAGS.items():
        if inner.get(name) or flat.get(name):
            flat[flag] = True
    if inner.get(IDS):
        flat[IDS] = from_sglang(inner[IDS])
    count = flat.get("num_aux_hidden_states")
    ids = flat.get(IDS)
    if count is not None and count != len(ids or range(AUX_LAYERS)):
        raise ValueError(
            f"num_aux_hidden_states is {count}, and {IDS} is {ids}: it must name as many layers"
        )
    return flat


def derive_norms(config: Config, tensors: Tensors) -> Config:
    """The config with the norms that the tensors have, where it says nothing of them."""
    norms: Config = {}
    if f"{FIRST_LAYER}.self_attn.q_norm.weight" in tensors:
        norms["qk_norm"] = True
    for field, name in NORM_TENSORS.items():
        if name in tensors and config.get(field) is None:
            norms[field] = True
    return config | norms
