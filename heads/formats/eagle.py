"""Heads of Llama's and Qwen3's layers: SafeAILab/EAGLE, SpecForge, SGLang, vLLM, speculators, z-lab.

Formats number the aux layers in two ways. Aux layer k stands for the input of layer k, which is
transformers' hidden_states[k]. vLLM, speculators and treespec name the layer that it enters; SGLang,
z-lab and SpecForge's DFlash name the layer that it leaves. In a target of five layers:

    hidden_states                       0   1   2   3   4   5
    eagle_aux_hidden_state_layer_ids    0   1   2   3   4       entered: vLLM, …
    eagle_config. …_layer_ids               0   1   2   3   4   left: SGLang
"""

from typing import Any

from transformers import Qwen3Config

from treespec.heads.folder import p_eagle_levels
from treespec.heads.formats.engines import IDS, QWEN3, SIZES, from_sglang, renamed
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.layers import SLIDING
from treespec.heads.registry import DFLASH, KIND, P_EAGLE

AUX_IDS = "aux_hidden_state_layer_ids"  # DFlash's, in speculators and treespec
VERIFIERS = ("verifier_lm_head.weight", "verifier_norm.weight")  # copies of the target's, not used
NAMES = (  # of published tensors: treespec's; the last three are older, and SGLang renames them too
    (r"^layers\.0\.", "midlayer."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
FROM_SGLANG = (r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm.")  # a norm of later layers
NESTED = {  # in eagle_config, as vLLM and TensorRT-LLM read it: at the top level
    "norm_before_fc": "norm_before_fc",
    "return_hidden_post_norm": "norm_output",
}
OWN = (  # next to speculators' layer
    *(
        "draft_vocab_size",
        "target_hidden_size",
        "mask_token_id",
        "sample_from_anchor",
        "block_size",
    ),
    *(IDS, AUX_IDS, "norm_before_fc", "fc_norm", "norm_output"),
)
BIASES = ("attention_bias", "attention_sink_bias", "add_swa_attention_sink_bias")


def read_eagle(config: Config, tensors: Tensors) -> Stored:
    """EAGLE-1: add `bias: false` for a head of vLLM's architecture, whose config may omit it."""
    check_norms(config, "an EAGLE-1 or EAGLE-2 head", has=False)
    if config.get("architectures") == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors:
        config = config | {"bias": False}
    return config, tensors


def read_eagle3(config: Config, tensors: Tensors) -> Stored:
    """Rename layers.0 to midlayer, translate SGLang's layer ids, and drop a d2t of all tokens.

    A layer is Qwen3's by its architecture or its tensors. Raises ValueError for aux layers that
    contradict each other, and for norms that the head does not have.
    """
    if (kind := config.get(KIND, "eagle3")) != "eagle3":
        raise ValueError(f"{KIND} is {kind!r}: treespec reads 'dflash', 'eagle3' and 'peagle'")
    config = of_speculators(config, norm_before_residual=True)
    check_norms(config, "an EAGLE-3 head", has=True)
    config = untangled(config)
    if config.get("use_aux_norm"):
        config["fc_norm"] = True
    tensors = renamed(used(tensors), *NAMES)
    plain = renamed(tensors, FROM_SGLANG)
    if len(plain) == len(tensors):  # no layer has both names
        tensors = plain
    if QWEN3 in (config.get("architectures") or ()):
        config = as_qwen3(config)
    elif "midlayer.self_attn.q_norm.weight" in tensors:
        config["qk_norm"] = True
    return config, tensors


def read_p_eagle(config: Config, tensors: Tensors) -> Stored:
    """As EAGLE-3's. Raises ValueError also for a config that does not tell the mask token."""
    if config.get("mask_token_id") is None:
        raise ValueError(
            "config.json does not tell mask_token_id: add the token that the head was trained with"
        )
    levels = p_eagle_levels(config)
    fields, tensors = read_eagle3(config | ({KIND: "eagle3"} if KIND in config else {}), tensors)
    return fields | {"model_type": P_EAGLE, "levels": levels}, tensors


def read_dflash(config: Config, tensors: Tensors) -> Stored:
    """z-lab and SpecForge nest fields in `dflash_config`, speculators the layers.

    Raises ValueError for a part that treespec's head does not have, and for a missing field.
    """
    # 1. The nested fields.
    nested = config.get("dflash_config") or {}
    if (kind := nested.get("projector_type") or DFLASH) != DFLASH:
        raise ValueError(f"projector_type is {kind!r}, of which only 'dflash' is known")
    if nested.get("shift_label") or nested.get("pure_draft_prefix_len"):
        raise ValueError("shift_label or pure_draft_prefix_len is set, which is not known")
    known = of_speculators({name: config[name] for name in config if name != "dflash_config"})
    fields = as_qwen3(known)
    own = ("block_size", "mask_token_id", "attention_sink_bias")
    fields |= {name: nested[name] for name in own if name in nested}
    if bias := next((name for name in BIASES if fields.get(name)), None):
        raise ValueError(f"{bias} is {fields[bias]}: a bias that treespec's head does not have")
    if fields.get("is_neox_style") is False:
        raise ValueError("is_neox_style is false: treespec rotates halves, not neighbours")

    # 2. Windows, and which layers are causal.
    layers = int(fields.get("num_hidden_layers", 1))
    causal = config.get("is_causal", nested.get("causal"))
    if nested.get("use_swa") and SLIDING not in (fields.get("layer_types") or ()):
        fields["layer_types"], causal = [SLIDING] * layers, bool(causal)
    if "swa_window_size" in nested:
        fields["sliding_window"] = nested["swa_window_size"]
    if config.get("sliding_window_non_causal"):
        causal = False
    if causal is not None:
        fields["causal"] = [bool(causal)] * layers

    # 3. Aux layers: those that the features leave, evenly spaced if z-lab names none.
    ids, depth = nested.get("target_layer_ids"), config.get("num_target_layers")
    if ids is None and depth and AUX_IDS not in config:
        ids = spaced(int(depth), layers)
    fields[AUX_IDS] = from_sglang(ids) if ids else fields.get(AUX_IDS)
    for name in (AUX_IDS, "mask_token_id", "block_size"):
        if fields.get(name) is None:
            words = "the layers that it reads" if name == AUX_IDS else name
            raise ValueError(f"config.json does not tell {words}, which a DFlash head needs")

    # 4. The output layer of its own, and its tokens.
    tensors = used(tensors)
    fields["own_output"] = "lm_head.weight" in tensors
    drafted = fields.get("draft_vocab_size")
    if drafted not in (None, fields.get("vocab_size")) and not fields["own_output"]:
        raise ValueError(f"draft_vocab_size is {drafted}, and lm_head.weight is missing")
    return fields | {"model_type": DFLASH}, tensors


def spaced(target_layers: int, layers: int) -> list[int]:
    """The layers of a target that z-lab reads for a head of `layers` layers."""
    if layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (layers - 1)) for i in range(layers)]


def of_speculators(config: Config, **defaults: Any) -> Config:
    """A config of speculators, flat; any other as a copy. defaults: of fields that it leaves out.

    Raises ValueError without a nested layer, and for a layer of another family.
    """
    if KIND not in config:
        return dict(config)
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("transformer_layer_config is missing")
    family = layer.get("model_type", "qwen3")
    if family not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config is of model_type {family!r}, of which only 'llama' and "
            "'qwen3' are known"
        )
    own = {name: config[name] for name in (*OWN, *defaults) if config.get(name) is not None}
    architecture = QWEN3 if family == "qwen3" else "LlamaForCausalLMEagle3"
    return layer | defaults | own | {"architectures": [architecture]}


def as_qwen3(config: Config) -> Config:
    """A config of Qwen3 layers as treespec's: Llama's fields, with Qwen3's own defaults.

    transformers of earlier versions leave out what equals a default, and Llama's differ.
    """
    defaults = Qwen3Config().to_dict()
    known = {name: defaults[name] for name in (*SIZES, "max_position_embeddings")}
    return known | config | {"model_type": "llama", "qk_norm": True}


def untangled(config: Config) -> Config:
    """The config with treespec's fields instead of `eagle_config`, the nested one."""
    if "eagle_config" not in config:
        return config
    if not isinstance(nested := config.pop("eagle_config"), dict):
        raise ValueError(f"eagle_config is no set of fields: {nested!r}")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError(
            "eagle_config.use_aux_hidden_state is false: a head without aux layers is not EAGLE-3's"
        )
    config |= {own: True for name, own in NESTED.items() if nested.get(name)}
    if not nested.get(IDS):
        return config
    entered = from_sglang(nested[IDS])
    if config.get(IDS, entered) != entered:
        raise ValueError(
            f"{IDS} is {config[IDS]}, and in eagle_config {nested[IDS]}, which is {entered}: delete "
            "one"
        )
    return config | {IDS: entered}


def check_norms(config: Config, known_as: str, has: bool) -> None:
    """Raises ValueError for ModelOpt's fields that describe other norms than a head's.

    has: whether the first layer norms its input, and a norm stands before the output layer.
    """
    nested = config.get("eagle_config")
    config = config | (nested if isinstance(nested, dict) else {})
    fields = {"use_input_layernorm_in_first_layer": has, "use_last_layernorm": has}
    for name, expected in (fields | {"use_mtp_layernorm": False}).items():
        if config.get(name) not in (None, expected):
            words = "has that norm" if expected else "has no such norm"
            raise ValueError(f"{name} is {config[name]}: {known_as} {words}")


def used(tensors: Tensors) -> Tensors:
    """The tensors without copies of the target's, and without a d2t and t2d of all tokens."""
    unused, d2t, t2d = set(VERIFIERS), tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and t2d is not None and d2t.shape == t2d.shape:
        unused |= {"d2t", "t2d"} if t2d.all() and not d2t.any() else set()
    return {name: value for name, value in tensors.items() if name not in unused}
