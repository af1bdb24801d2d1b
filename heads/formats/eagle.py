"""Heads of EAGLE's family: SafeAILab/EAGLE, SpecForge, SGLang, vLLM, speculators, ModelOpt, NeMo AutoModel.

Formats number the aux layers in two ways. Aux layer k is the input of layer k, which is transformers'
hidden_states[k]. vLLM, speculators and treespec name the layer that this hidden state enters; SGLang,
z-lab and SpecForge's DFlash name the layer that it leaves. In a target of five layers:

    hidden_states                       0   1   2   3   4   5
    eagle_aux_hidden_state_layer_ids    0   1   2   3   4   5   entered: vLLM, … (L: the last layer's output)
    eagle_config. …_layer_ids               0   1   2   3   4   left: SGLang
"""

from treespec.heads.eagle3 import AUX_LAYERS
from treespec.heads.folder import count_p_eagle_levels
from treespec.heads.formats import fields
from treespec.heads.formats.eagle3_fields import AUX_LAYERS_FIELD, EAGLE3_QWEN3_ARCHITECTURE
from treespec.heads.formats.layers import (
    VERIFIER_TENSORS,
    as_qwen3,
    check_window,
    count_layers,
    derive_biases,
    derive_sizes,
)
from treespec.heads.formats.llama_fields import rename_tensors
from treespec.heads.formats.rotary import read_rotary
from treespec.heads.formats.sglang import from_sglang
from treespec.heads.formats.speculators import flatten_speculators
from treespec.heads.formats.vllm import read_token_map
from treespec.heads.formats.vocabulary import OUTPUT_TENSOR, derive_vocabulary
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.layers import SLIDING_ATTENTION
from treespec.heads.registry import P_EAGLE_KIND, SPECULATORS_KIND_FIELD

EAGLE = "eagle"  # model_type of a head whose own output layer would make it look like EAGLE-3
MASK_HIDDEN = "mask_hidden"
FIRST_LAYER = "midlayer"  # EAGLE-3's first layer, in treespec
TENSOR_NAMES = (  # (published name, treespec's)
    (r"^layers\.0\.", f"{FIRST_LAYER}."),
    (r"^aux_norm_low\.", "fc_norm.0."),  # three older ones, which SGLang renames too
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm."),  # SGLang's, of later layers
)
SPECULATORS_NAMES = (  # (name in speculators' EAGLE-1, treespec's)
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
)
NORM_FLAGS = {  # vLLM's and TensorRT-LLM's flag, at the top or in eagle_config -> treespec's
    "norm_before_fc": "norm_before_fc",
    "return_hidden_post_norm": "norm_output",
    "use_aux_norm": "fc_norm",
}
NORM_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def read_eagle(config: Config, tensors: Tensors) -> Stored:
    """Read EAGLE-1, EAGLE-2 and HASS: SafeAILab's, SGLang's, vLLM's (nested too) and speculators' formats.

    The tensors decide whether `fc` and the queries have biases, and whether the head has its own output layer. The
    projects have no window; a config at the top level may have treespec's.
    """
    # 1. Move the layer's fields to the top level, and rename the tensors to SafeAILab's names.
    if SPECULATORS_KIND_FIELD in config:
        fields.SPECULATORS_EAGLE_TABLE.check(config)
        config = dict(config["transformer_layer_config"])
        tensors = rename_tensors(tensors, *SPECULATORS_NAMES)
    elif isinstance(config.get("model"), dict):
        fields.EAGLE_NESTED_TABLE.check(config)
        config = config["model"] | fields.drop_names(config, ("model", "model_type"))
    else:
        fields.EAGLE_TABLE.check(config)
        check_own_window(config)
    config = read_rotary(config)
    check_fusion(tensors)

    # 2. Derive fields from the tensors.
    config = derive_fusion_bias(config, tensors)
    config = derive_biases(config, tensors, "layers.0")
    config = derive_sizes(config, tensors, "layers.0")
    config, tensors = read_token_map(config, tensors)
    config, tensors = derive_vocabulary(config, tensors)
    if OUTPUT_TENSOR not in tensors:
        return config, tensors
    return config | {"own_output": True, "model_type": EAGLE}, tensors


def check_own_window(config: Config) -> None:
    """Raises ValueError for fields of a window that contradict each other, or name no layers."""
    check_window(config)
    types = config.get("layer_types") or ()
    if config.get("use_sliding_window") is False and SLIDING_ATTENTION in types:
        raise ValueError(
            f"layer_types is {types}, and use_sliding_window is false: delete the wrong one"
        )


def derive_fusion_bias(config: Config, tensors: Tensors) -> Config:
    """Set `bias` to whether the file has a bias of `fc`.

    Raises ValueError if the config says that there is a bias, and the file has none.
    """
    if "fc.bias" in tensors:
        if config.get("bias", True):
            return config
        return config | {"bias": True}
    if config.get("bias") or config.get("eagle_fc_bias"):
        raise ValueError("bias is true, and the file has no fc.bias: fetch the whole repository")
    return config | {"bias": False}


def check_fusion(tensors: Tensors) -> None:
    """Raises ValueError unless `fc` is [H, 2 H], for an embedding and a feature, as only in EAGLE-1."""
    shape = list(tensors["fc.weight"].shape)
    if len(shape) != 2 or shape[1] != 2 * shape[0]:
        raise ValueError(
            f"fc.weight is {shape}, and EAGLE-1's is [H, 2 H]: it is of an architecture that treespec does not know"
        )


def read_eagle3(config: Config, tensors: Tensors) -> Stored:
    """Read EAGLE-3 and EAGLE-3.1: SGLang's layer ids become aux layers, and layers.0 becomes midlayer.

    The tensors decide the sizes. Layers are Qwen3's if the architecture or the tensors say so.
    """
    return read_features(config, tensors, fields.EAGLE3_TABLE, fields.SPECULATORS_EAGLE3_TABLE)


def read_p_eagle(config: Config, tensors: Tensors) -> Stored:
    """Read P-EAGLE as EAGLE-3, with the mask token and its learnt feature."""
    changes: Config = {"model_type": P_EAGLE_KIND, "levels": count_p_eagle_levels(config)}
    for name in reversed(fields.MASK_TOKEN_FIELDS):  # the first of them counts
        if config.get(name) is not None:
            changes["mask_token_id"] = config[name]
    config, tensors = read_features(
        config, tensors, fields.P_EAGLE_TABLE, fields.SPECULATORS_P_EAGLE_TABLE
    )
    if MASK_HIDDEN in tensors:
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].reshape(1, 1, -1)
    return config | changes, tensors


def read_features(
    config: Config, tensors: Tensors, table: fields.FieldTable, nested: fields.FieldTable
) -> Stored:
    """Read a head whose features are aux hidden states.

    Args:
        config: the content of config.json, in the format of any project.
        tensors: the tensors of the file.
        table: the known fields of the config.
        nested: the known fields of speculators' config, which nests the layers.
    """
    if SPECULATORS_KIND_FIELD in config:
        table = nested
    table.check(config)
    config = flatten_eagle_config(flatten_speculators(config, norm_before_residual=True))
    config = read_rotary(config)
    tensors = fields.drop_names(tensors, VERIFIER_TENSORS)
    tensors = rename_tensors(tensors, *TENSOR_NAMES)
    architectures = config.get("architectures")
    if architectures and EAGLE3_QWEN3_ARCHITECTURE in architectures:
        config = as_qwen3(config)
    config = derive_norms(config, tensors)
    config = derive_biases(config, tensors, FIRST_LAYER)
    config = derive_sizes(config, tensors, FIRST_LAYER)
    config = count_layers(config, tensors, before=1)
    check_window(config)
    tied = bool(config.get("tie_word_embeddings"))
    config, tensors = derive_vocabulary(config, tensors, tied)
    if OUTPUT_TENSOR not in tensors:
        config = config | {"own_output": False}
    return config, tensors


def flatten_eagle_config(config: Config) -> Config:
    """Move the fields of `eagle_config` to the top level, and turn SGLang's layer ids into aux layers.

    Raises ValueError if `num_aux_hidden_states` is not the number of aux layers.
    """
    flat = fields.drop_names(config, ("eagle_config",))
    inner = fields.get_object(config, "eagle_config")
    for name, flag in NORM_FLAGS.items():
        if inner.get(name) or flat.get(name):
            flat[flag] = True
    if inner.get(AUX_LAYERS_FIELD):
        flat[AUX_LAYERS_FIELD] = from_sglang(inner[AUX_LAYERS_FIELD])
    count = flat.get("num_aux_hidden_states")
    ids = flat.get(AUX_LAYERS_FIELD)
    expected = len(ids) if ids else AUX_LAYERS
    if count is not None and count != expected:
        raise ValueError(
            f"num_aux_hidden_states is {count}, but {AUX_LAYERS_FIELD} is {ids}: it must name {count} layers"
        )
    return flat


def derive_norms(config: Config, tensors: Tensors) -> Config:
    """Add the norms that the tensors have to a config that does not mention them."""
    norms: Config = {}
    if f"{FIRST_LAYER}.self_attn.q_norm.weight" in tensors:
        norms["qk_norm"] = True
    for field, name in NORM_TENSORS.items():
        if name in tensors and config.get(field) is None:
            norms[field] = True
    return config | norms
