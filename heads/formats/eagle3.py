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
from treespec.heads.registry import KIND

IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = "LlamaForCausalLMEagle3"
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
OWN = ("draft_vocab_size", "target_hidden_size", IDS, *NORMS)  # beside speculators' layer
VERSION = "0.9.0"  # of speculators, whose logits tests/test_upstream.py compares
DRAFTED = 3  # tokens a cycle, vLLM's default for such a directory
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
    if KIND in config:
        config = _of_speculators(config)
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


def _of_speculators(config: Config) -> Config:
    """The flat config. Raises ValueError for other speculators, and for layers of others."""
    if (kind := config[KIND]) != "eagle3":
        raise ValueError(f"{KIND} is {kind!r}: treespec reads 'dflash', 'eagle3' and 'peagle'")
    layer = nested_layer(config)
    family = layer.get("model_type", "qwen3")
    if family not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config is of model_type {family!r}, of which only 'llama' and "
            "'qwen3' are known"
        )
    fields = {name: config[name] for name in OWN if config.get(name) is not None}
    fields["norm_before_residual"] = config.get("norm_before_residual", True)
    return layer | fields | {"architectures": [QWEN3 if family == "qwen3" else LLAMA]}


def nested_layer(config: Config) -> Config:
    """The decoder layer's fields in a config of speculators. Raises ValueError without them."""
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("transformer_layer_config is missing")
    return layer


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


def write(head: Eagle3Head, served: Served, to: str) -> Stored:
    """For an engine, SafeAILab/EAGLE, or treespec itself: a head in treespec's own terms.

    SafeAILab/EAGLE reads no layer ids, and no embedding of another width. SGLang requires
    `draft_vocab_size`, and names a norm of later layers otherwise. vLLM refuses unknown tensors,
    and d2t of a head that drafts all tokens; it loads a directory of speculators together with the
    target that it names.
    """
    # 1. What all have.
    config, tensors = head.config, head.state_dict()
    if to == "treespec":
        return config, tensors
    check_layer(head, to)
    parts = parts_of(head)
    check_parts(parts, to)
    layers = llama_fields(head, served) | layer_fields(head)
    own = {"draft_vocab_size": head.lm_head.out_features, "target_hidden_size": served.hidden_size}
    taps, norms = {IDS: list(head.taps)}, {name: name in parts for name in NORMS}
    norms_of_vllm = norms | {"norm_before_residual": head.midlayer.norm_before_residual}
    qwen = "qk_norm" in parts

    # 2. What the format has of its own.
    if to == "vllm":
        architecture = QWEN3 if qwen else LLAMA
        return {"architectures": [architecture]} | layers | own | taps | norms_of_vllm, tensors
    if to == "sglang":
        left = {IDS: to_sglang_ids(head.taps), "use_aux_hidden_state": True}
        del norms["norm_before_fc"]
        config = {"architectures": [LLAMA]} | layers | own | {"eagle_config": left} | norms
        return config, renamed(tensors, TO_SGLANG)
    if to == "eagle":
        depth = served.layers
        if head.taps != (expected := (2, depth // 2, depth - 3)):
            raise ValueError(
                f"it taps {', '.join(map(str, head.taps))}, and SafeAILab/EAGLE {expected} in any "
                "case"
            )
        if served.hidden_size == head.hidden_size:
            del own["target_hidden_size"]
        return {"architectures": ["LlamaForCausalLM"]} | layers | own | taps, tensors

    # 3. speculators nests the layer, and says how `vllm serve` shall draft.
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    family = "Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"
    config = {
        KIND: "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3Speculator"],
        **(own | taps | norms_of_vllm),
        "tie_word_embeddings": False,
        "torch_dtype": dtype_of(head),
        "transformer_layer_config": {"architectures": [family]} | layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": served.name, "architectures": list(served.architectures)},
        },
    }
    return config, renamed(tensors, (r"^midlayer\.", "layers.0."))


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


def check_parts(parts: set[str], to: str) -> None:
    """Raises ValueError for a part that the format `to` has no place for."""
    for name in sorted(parts):
        words, formats = PARTS[name]
        if to not in formats:
            *before, last = formats
            known = f"{', '.join(before)} and {last}"
            raise ValueError(f"{words} ({name}), which only {known} know")


def layer_fields(head: Eagle3Head) -> Config:
    """The number of layers, their family, and their windows if any has one."""
    windows = [attention.window for attention in head.attentions]
    family = "llama" if head.attentions[0].q_norm is None else "qwen3"
    fields: Config = {"model_type": family, "num_hidden_layers": len(windows)}
    if not any(windows):
        return fields
    return fields | {
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "sliding_window": next(window for window in windows if window is not None),
        "use_sliding_window": True,
    }
