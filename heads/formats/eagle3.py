"""EAGLE-3 heads of SafeAILab/EAGLE, SpecForge, SGLang and vLLM.

Formats number the tapped layers in two ways. A tap k is the input of layer k, which is
transformers' hidden_states[k]. vLLM, speculators and treespec name the layer that it enters, SGLang
the layer that it leaves. In a target of five layers:

    hidden_states                       0   1   2   3   4   5
    eagle_aux_hidden_state_layer_ids    0   1   2   3   4       entered: vLLM, …
    eagle_config. …_layer_ids               0   1   2   3   4   left: SGLang
"""

import re
from collections.abc import Collection

from transformers import Qwen3Config

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle import check_project
from treespec.heads.formats.eagle3_parts import check_parts, layer_fields, norm_fields
from treespec.heads.formats.engines import Served, check_layer, check_norms, llama_fields
from treespec.heads.head import Config, Stored, Tensors

IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = "Eagle3Qwen3ForCausalLM"  # vLLM's architecture for layers of Qwen3
ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", QWEN3)
QUERY_NORM = "midlayer.self_attn.q_norm.weight"
SIZES = (
    *("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
NESTED = {  # in eagle_config, as vLLM and TensorRT-LLM read it: at the top level
    "norm_before_fc": "norm_before_fc",
    "return_hidden_post_norm": "norm_output",
}
OLDER = {  # tensors that SGLang renames too
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


def read(config: Config, tensors: Tensors) -> Stored:
    """Rename layers.0 to midlayer, translate SGLang's taps, and drop a d2t of all tokens.

    A layer is Qwen3's by its architecture or its tensors. Raises ValueError for taps that
    contradict each other, and for norms that the head does not have.
    """
    # 1. The fields.
    check_norms(config, Eagle3Head.known_as, has=True)
    if "eagle_config" in config:
        config = _untangled(config)
    if config.get("use_aux_norm"):
        config = config | {"fc_norm": True}
    tensors = {_renamed(name, tensors): value for name, value in tensors.items()}
    if QWEN3 in (config.get("architectures") or ()):
        config = as_qwen3(config)
    elif QUERY_NORM in tensors:
        config = config | {"qk_norm": True}

    # 2. The draft vocabulary.
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or t2d is None or d2t.shape != t2d.shape:
        return config, tensors
    if not d2t.any() and t2d.all():
        del tensors["d2t"], tensors["t2d"]
    return config, tensors


def as_qwen3(config: Config) -> Config:
    """A config of Qwen3 layers as treespec's: Llama's fields, with Qwen3's own defaults.

    transformers of earlier versions leave out what equals a default, and Llama's differ.
    """
    defaults = Qwen3Config().to_dict()
    known = {name: defaults[name] for name in SIZES}
    return known | config | {"model_type": "llama", "qk_norm": True}


def _renamed(name: str, names: Collection[str]) -> str:
    """treespec's name of a tensor. SGLang calls the norm of later layers hidden_norm."""
    if name.startswith("layers.0."):
        return name.replace("layers.0.", "midlayer.", 1)
    plain = name.replace(".hidden_norm.", ".input_layernorm.")
    if re.match(r"layers\.\d+\.hidden_norm\.", name) and plain not in names:
        return plain
    older = next((start for start in OLDER if name.startswith(start)), None)
    return name if older is None else name.replace(older, OLDER[older], 1)


def _untangled(config: Config) -> Config:
    """Replace nested taps and norms by treespec's fields."""
    nested = config["eagle_config"]
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config is no set of fields: {nested!r}")
    if not nested.get("use_aux_hidden_state", True):
        raise ValueError(
            "eagle_config.use_aux_hidden_state is false: a head without taps is not EAGLE-3's"
        )
    config = {name: value for name, value in config.items() if name != "eagle_config"}
    config |= {own: True for name, own in NESTED.items() if nested.get(name)}
    if not nested.get(IDS):
        return config
    taps = from_sglang(nested[IDS])
    if config.get(IDS, taps) != taps:
        raise ValueError(
            f"{IDS} is {config[IDS]}, and in eagle_config {nested[IDS]}, which is {taps}: delete "
            "one"
        )
    return config | {IDS: taps}


def from_sglang(ids: list[int]) -> list[int]:
    """SGLang's layer ids -> taps."""
    return [int(k) + 1 for k in ids]


def to_sglang_ids(taps: tuple[int, ...]) -> list[int]:
    """Taps -> SGLang's layer ids. Raises ValueError for the embedding, which no layer puts out."""
    if 0 in taps:
        raise ValueError("it taps the target's embedding, which SGLang cannot: export it to vllm")
    return [k - 1 for k in taps]


def to_eagle(head: Eagle3Head, served: Served) -> Stored:
    """For SafeAILab/EAGLE, which reads no layer ids, and no embedding of another width."""
    check_layer(head, activation=None)
    check_parts(head, "eagle")
    check_project(head)
    layers = served.layers
    if head.taps != (2, layers // 2, layers - 3):
        raise ValueError(
            f"it taps {', '.join(map(str, head.taps))}, and SafeAILab/EAGLE "
            f"{2, layers // 2, layers - 3} in any case"
        )
    config = _config(head, served, "LlamaForCausalLM") | {IDS: list(head.taps)}
    if config["target_hidden_size"] == head.hidden_size:
        del config["target_hidden_size"]
    return config, head.state_dict()


def to_sglang(head: Eagle3Head, served: Served) -> Stored:
    """For SGLang, which requires `draft_vocab_size`, and names a norm of later layers otherwise."""
    check_layer(head)
    check_parts(head, "sglang")
    taps = {"eagle_config": {IDS: to_sglang_ids(head.taps), "use_aux_hidden_state": True}}
    norms = {name: value for name, value in norm_fields(head).items() if name != "norm_before_fc"}
    tensors = {
        re.sub(r"^(layers\.\d+\.)input_layernorm\.", r"\1hidden_norm.", name): value
        for name, value in head.state_dict().items()
    }
    return _config(head, served, "LlamaForCausalLMEagle3") | taps | norms, tensors


def to_vllm(head: Eagle3Head, served: Served) -> Stored:
    """For vLLM, which refuses unknown tensors, and d2t of a head that drafts all tokens."""
    check_layer(head)
    config = {IDS: list(head.taps), "norm_before_residual": head.midlayer.norm_before_residual}
    family = layer_fields(head)["model_type"]
    architecture = QWEN3 if family == "qwen3" else "LlamaForCausalLMEagle3"
    return _config(head, served, architecture) | config | norm_fields(head), head.state_dict()


def to_treespec(head: Eagle3Head, served: Served) -> Stored:
    """For treespec itself: a head of another project in treespec's own terms."""
    return head.config, head.state_dict()


def _config(head: Eagle3Head, served: Served, architecture: str) -> Config:
    own = {"draft_vocab_size": head.lm_head.out_features, "target_hidden_size": served.hidden_size}
    layers = llama_fields(head, served) | layer_fields(head)
    return {"architectures": [architecture]} | layers | own
