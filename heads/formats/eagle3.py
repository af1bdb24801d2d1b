"""EAGLE-3 heads of SafeAILab/EAGLE, SpecForge, SGLang, vLLM and vllm-project/speculators.

Formats number the tapped layers in two ways. A tap k is the input of layer k, which is
transformers' hidden_states[k]. vLLM, speculators and treespec name the layer that it enters, SGLang
the layer that it leaves. In a target of five layers:

    hidden_states                       0   1   2   3   4   5
    eagle_aux_hidden_state_layer_ids    0   1   2   3   4       entered: vLLM, …
    eagle_config. …_layer_ids               0   1   2   3   4   left: SGLang
"""

from transformers import Qwen3Config

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle import check_project
from treespec.heads.formats.engines import (
    SIZES,
    Served,
    check_layer,
    check_norms,
    dtype_of,
    llama_fields,
    renamed,
    without_whole_map,
)
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.layers import FULL, SLIDING

IDS = "eagle_aux_hidden_state_layer_ids"
QWEN3 = "Eagle3Qwen3ForCausalLM"  # vLLM's architecture for layers of Qwen3
QUERY_NORM = "midlayer.self_attn.q_norm.weight"
NESTED = {  # in eagle_config, as vLLM and TensorRT-LLM read it: at the top level
    "norm_before_fc": "norm_before_fc",
    "return_hidden_post_norm": "norm_output",
}
NAMES = (  # of published tensors: treespec's; the last three are older, and SGLang renames them too
    (r"^layers\.0\.", "midlayer."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
)
# The norm of later layers, as SGLang calls it, and back.
FROM_SGLANG = (r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm.")
TO_SGLANG = (r"^(layers\.\d+\.)input_layernorm\.", r"\1hidden_norm.")

NORMS = ("norm_before_fc", "fc_norm", "norm_output")
VLLM = ("vllm", "speculators")
ENGINES = ("sglang", *VLLM)
# The parts that newer heads have, by their names in config.json: in words, and the formats that
# have a place for each. EAGLE-3.1 is `fc_norm` and `norm_output`.
PARTS = {
    "norm_before_residual": ("its residual is normed", VLLM),
    "norm_before_fc": ("a norm takes all its taps together", VLLM),
    "fc_norm": ("each of its taps has a norm", ENGINES),
    "norm_output": ("its next feature is the normed state", ENGINES),
    "qk_norm": ("its layers are Qwen3's", VLLM),
    "num_hidden_layers": ("it has several layers", ENGINES),
    "sliding_window": ("its layers look back over a window alone", VLLM),
}


def read(config: Config, tensors: Tensors) -> Stored:
    """Rename layers.0 to midlayer, translate SGLang's taps, and drop a d2t of all tokens.

    A layer is Qwen3's by its architecture or its tensors. Raises ValueError for taps that
    contradict each other, and for norms that the head does not have.
    """
    check_norms(config, Eagle3Head.known_as, has=True)
    if "eagle_config" in config:
        config = _untangled(config)
    if config.get("use_aux_norm"):
        config = config | {"fc_norm": True}
    tensors = renamed(tensors, *NAMES)
    plain = renamed(tensors, FROM_SGLANG)
    if len(plain) == len(tensors):  # no layer has both names
        tensors = plain
    if QWEN3 in (config.get("architectures") or ()):
        config = as_qwen3(config)
    elif QUERY_NORM in tensors:
        config = config | {"qk_norm": True}
    return config, without_whole_map(tensors)


def as_qwen3(config: Config) -> Config:
    """A config of Qwen3 layers as treespec's: Llama's fields, with Qwen3's own defaults.

    transformers of earlier versions leave out what equals a default, and Llama's differ.
    """
    defaults = Qwen3Config().to_dict()
    known = {name: defaults[name] for name in (*SIZES, "max_position_embeddings")}
    return known | config | {"model_type": "llama", "qk_norm": True}


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
    tensors = renamed(head.state_dict(), TO_SGLANG)
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


def parts_of(head: Eagle3Head) -> set[str]:
    """The names in PARTS of what a head has."""
    attentions = head.attentions
    has = {
        "norm_before_residual": head.midlayer.norm_before_residual,
        "norm_before_fc": head.input_norm is not None,
        "fc_norm": head.fc_norm is not None,
        "norm_output": head.norm_output,
        "qk_norm": attentions[0].q_norm is not None,
        "num_hidden_layers": len(attentions) > 1,
        "sliding_window": any(attention.window is not None for attention in attentions),
    }
    return {name for name, there in has.items() if there}


def check_parts(head: Eagle3Head, to: str) -> None:
    """Raises ValueError for a part that the format `to` has no place for."""
    for name in sorted(parts_of(head)):
        words, formats = PARTS[name]
        if to not in formats:
            *before, last = formats
            known = f"{', '.join(before)} and {last}"
            raise ValueError(f"{words} ({name}), which only {known} know")


def norm_fields(head: Eagle3Head) -> Config:
    """Whether a head has each of NORMS."""
    parts = parts_of(head)
    return {name: name in parts for name in NORMS}


def layer_fields(head: Eagle3Head) -> Config:
    """The number of layers, their family, and their windows if any has one."""
    windows = [attention.window for attention in head.attentions]
    family = "qwen3" if "qk_norm" in parts_of(head) else "llama"
    fields: Config = {"model_type": family, "num_hidden_layers": len(windows)}
    if not any(windows):
        return fields
    return fields | {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next(window for window in windows if window is not None),
        "use_sliding_window": True,
    }


OWN = ("draft_vocab_size", "target_hidden_size", IDS, *NORMS)
VERSION = "0.9.0"  # of speculators, whose logits tests/test_upstream.py compares
DRAFTED = 3  # tokens a cycle, vLLM's default for such a directory


def read_any(config: Config, tensors: Tensors) -> Stored:
    """An EAGLE-3 directory of this project or of the others."""
    return (read_speculators if "speculators_model_type" in config else read)(config, tensors)


def read_speculators(config: Config, tensors: Tensors) -> Stored:
    """Flatten the config. Raises ValueError for other speculators, and for layers of others."""
    if (kind := config["speculators_model_type"]) != "eagle3":
        raise ValueError(
            f"speculators_model_type is {kind!r}: treespec reads 'dflash', 'eagle3' and 'peagle'"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("transformer_layer_config is missing")
    family = layer.get("model_type", "qwen3")
    if family not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config is of model_type {family!r}, of which only 'llama' and "
            "'qwen3' are known"
        )
    fields = {name: config[name] for name in OWN if config.get(name) is not None}
    fields["norm_before_residual"] = config.get("norm_before_residual", True)
    architecture = QWEN3 if family == "qwen3" else "LlamaForCausalLMEagle3"
    return read(layer | fields | {"architectures": [architecture]}, tensors)


def to_speculators(head: Eagle3Head, served: Served) -> Stored:
    """The directory that `vllm serve` loads together with the target that it names."""
    check_layer(head)
    # 1. How `vllm serve` shall draft with it.
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }

    # 2. The nested config, and the tensors by the name of its layer.
    layers = layer_fields(head)
    family = "Qwen3ForCausalLM" if layers["model_type"] == "qwen3" else "LlamaForCausalLM"
    config = {
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": served.hidden_size,
        IDS: list(head.taps),
        "norm_before_residual": head.midlayer.norm_before_residual,
        **norm_fields(head),
        "tie_word_embeddings": False,
        "torch_dtype": dtype_of(head),
        "transformer_layer_config": {"architectures": [family]}
        | llama_fields(head, served)
        | layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": served.name, "architectures": list(served.architectures)},
        },
    }
    return config, renamed(head.state_dict(), (r"^midlayer\.", "layers.0."))
