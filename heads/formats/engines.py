"""What formats share: names of tensors, the served target, and Llama's fields for all versions."""

import re
from dataclasses import dataclass

from transformers import LlamaConfig, PretrainedConfig

from treespec.heads.features import FeatureHead
from treespec.heads.head import Config, Head, Tensors

SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps"),
)
ROTARY = ("default", "linear", "dynamic")  # the types that SafeAILab/EAGLE computes


@dataclass(frozen=True)
class Served:
    """The target beside which an engine runs the head.

    name: the directory or hub id from which the engine loads it.
    """

    name: str
    architectures: tuple[str, ...]
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int

    @classmethod
    def of(cls, name: str, config: PretrainedConfig) -> "Served":
        """From the target's config, or its text model's."""
        text = config.get_text_config()
        return cls(
            name,
            tuple(config.architectures or ()),
            text.num_hidden_layers,
            text.hidden_size,
            text.vocab_size,
            getattr(text, "max_position_embeddings", None) or 0,
        )


def renamed(tensors: Tensors, *patterns: tuple[str, str]) -> Tensors:
    """The tensors under the names that (pattern, replacement) after the other give."""
    found: Tensors = {}
    for name, value in tensors.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        found[name] = value
    return found


def without_whole_map(tensors: Tensors) -> Tensors:
    """The tensors without d2t and t2d, if these name all tokens of the target in order."""
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or t2d is None or d2t.shape != t2d.shape or d2t.any() or not t2d.all():
        return tensors
    return {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}


def dtype_of(head: Head) -> str:
    """The dtype of a head's weights, as config.json names it."""
    return str(head.dtype).removeprefix("torch.")


def check_norms(config: Config, known_as: str, has: bool) -> None:
    """Raises ValueError for ModelOpt's fields that describe other norms than a head's.

    has: whether the first layer norms its input, and a norm stands before the output layer.
    """
    fields = {"use_input_layernorm_in_first_layer": has, "use_last_layernorm": has}
    nested = config.get("eagle_config")
    config = config | (nested if isinstance(nested, dict) else {})
    for name, expected in (fields | {"use_mtp_layernorm": False}).items():
        if config.get(name) not in (None, expected):
            words = "has that norm" if expected else "has no such norm"
            raise ValueError(f"{name} is {config[name]}: {known_as} {words}")


def check_layer(head: FeatureHead, to: str, biases: bool = False) -> None:
    """Raises ValueError for a decoder layer that a format cannot describe, or does not compute.

    biases: whether the format has a field for biases of queries, keys and values.
    """
    # 1. What no format has, and the engines' activation; SafeAILab/EAGLE has a field for it.
    llama = LlamaConfig(**head.config)
    if head.embed_scale != 1.0:
        raise ValueError(
            f"its target's embeddings are scaled by {head.embed_scale:g}, for which there is no "
            "field"
        )
    if head.config.get("qkv_bias") and not biases:
        raise ValueError("its queries, keys and values have biases, for which there is no field")
    if to != "eagle":
        if llama.hidden_act != "silu":
            raise ValueError(f"its activation is {llama.hidden_act}, where the engines have silu")
        return

    # 2. What SafeAILab/EAGLE computes.
    rope = llama.rope_parameters or {}
    if (kind := rope.get("rope_type")) not in ROTARY:
        raise ValueError(
            f"its rotary positions are of type {kind!r}, which is none of {', '.join(ROTARY)}"
        )
    if (part := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"its partial_rotary_factor is {part}, which the project does not compute")
    if (width := (llama.head_dim or 0) * llama.num_attention_heads) != llama.hidden_size:
        raise ValueError(
            f"its attention heads are {width} wide together, not {llama.hidden_size} as there"
        )


def llama_fields(head: FeatureHead, served: Served) -> Config:
    """The fields of a Llama of one layer. `eagle3` overrides what its layers have otherwise.

    They hold the rotary positions three times, because versions of the engines read different
    fields. The context is at least the target's: the engines stop at the end of the shorter one.
    """
    # 1. Rotary positions, under the names that old and new versions read.
    llama = LlamaConfig(**head.config)
    rope: Config = dict(llama.rope_parameters or {})
    kind, theta = rope["rope_type"], rope["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"} | {"type": kind}

    # 2. All fields.
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(llama, name) for name in SIZES},
        "max_position_embeddings": max(llama.max_position_embeddings, served.context_length),
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": rope,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_of(head),
    }
