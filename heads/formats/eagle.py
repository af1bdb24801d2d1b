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
NAMES = (  # of published tensors: treespec's
    (r"^layers\.0\.", "midlayer."),
    (r"^aux_norm_low\.", "fc_norm.0."),  # three older ones, which SGLang renames too
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm."),  # SGLang's, of later layers
)
FLAGS = {  # at the top, or in eagle_config, as vLLM and TensorRT-LLM read it: treespec's
    "norm_before_fc": "norm_before_fc",
    "return_hidden_post_norm": "norm_output",
    "use_aux_norm": "fc_norm",
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
ABSENT = (  # fields of DFlash's whose parts treespec's head does not have
    *("shift_label", "pure_draft_prefix_len", "attention_bias", "attention_sink_bias"),
    "add_swa_attention_sink_bias",
)


def read_eagle(config: Config, tensors: Tensors) -> Stored:
    """EAGLE-1: add `bias: false` for a head of vLLM's architecture, whose config may omit it."""
    if config.get("architectures") == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors:
        config = config | {"bias": False}
    return config, tensors


def read_eagle3(config: Config, tensors: Tensors) -> Stored:
    """Rename layers.0 to midlayer, translate SGLang's layer ids, and drop a d2t of all tokens.

    A layer is Qwen3's by its architecture or its tensors.
    """
    if (kind := config.get(KIND, "eagle3")) != "eagle3":
        raise ValueError(f"{KIND} is {kind!r}: treespec reads 'dflash', 'eagle3' and 'peagle'")
    config = of_speculators(config, norm_before_residual=True)
    nested = config.pop("eagle_config", None) or {}
    config |= {own: True for name, own in FLAGS.items() if (config | nested).get(name)}
    if ids := nested.get(IDS):
        config[IDS] = from_sglang(ids)
    tensors = renamed(used(tensors), *NAMES)
    if QWEN3 in (config.get("architectures") or ()):
        config = as_qwen3(config)
    elif "midlayer.self_attn.q_norm.weight" in tensors:
        config["qk_norm"] = True
    return config, tensors


def read_p_eagle(config: Config, tensors: Tensors) -> Stored:
    """As EAGLE-3's."""
    own = {"model_type": P_EAGLE, "levels": p_eagle_levels(config)}
    fields, tensors = read_eagle3(config | ({KIND: "eagle3"} if KIND in config else {}), tensors)
    return fields | own, tensors


def read_dflash(config: Config, tensors: Tensors) -> Stored:
    """z-lab and SpecForge nest fields in `dflash_config`, speculators the layers.

    Raises ValueError for a part that treespec's head does not have.
    """
    # 1. The nested fields.
    nested = config.get("dflash_config") or {}
    fields = as_qwen3(of_speculators(config))
    both = fields | nested
    if (kind := both.get("projector_type") or DFLASH) != DFLASH:
        raise ValueError(f"projector_type is {kind!r}, of which only 'dflash' is known")
    if other := next((name for name in ABSENT if both.get(name)), None):
        raise ValueError(f"{other} is {both[other]}: a part that treespec's head does not have")
    if both.get("is_neox_style") is False:
        raise ValueError("is_neox_style is false: treespec rotates halves, not neighbours")
    fields |= {name: nested[name] for name in ("block_size", "mask_token_id") if name in nested}

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

    # 3. Aux layers: those that the features leave, evenly spaced if z-lab names none. Its output.
    ids, depth = nested.get("target_layer_ids"), config.get("num_target_layers")
    if ids is None and depth and AUX_IDS not in config:
        ids = spaced(int(depth), layers)
    if ids:
        fields[AUX_IDS] = from_sglang(ids)
    own = {"model_type": DFLASH, "own_output": "lm_head.weight" in tensors}
    return fields | own, used(tensors)


def spaced(target_layers: int, layers: int) -> list[int]:
    """The layers of a target that z-lab reads for a head of `layers` layers."""
    if layers == 1:
        return [target_layers // 2]
    first, last = 1, target_layers - 3
    return [round(first + i * (last - first) / (layers - 1)) for i in range(layers)]


def of_speculators(config: Config, **defaults: Any) -> Config:
    """A config of speculators, flat; any other as a copy. defaults: of fields that it leaves out.

    Raises ValueError for a layer of another family.
    """
    if KIND not in config:
        return dict(config)
    layer = config["transformer_layer_config"]
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


def used(tensors: Tensors) -> Tensors:
    """The tensors without copies of the target's, and without a d2t and t2d of all tokens."""
    unused, d2t, t2d = [*VERIFIERS], tensors.get("d2t"), tensors.get("t2d")
    if d2t is not None and t2d is not None and t2d.all() and not d2t.any():
        unused += ["d2t", "t2d"]
    return {name: value for name, value in tensors.items() if name not in unused}
