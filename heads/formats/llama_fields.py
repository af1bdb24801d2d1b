"""Shared by the writers of all engines: Llama's fields, checks of the layer, and renaming of tensors."""

import re

from transformers import PretrainedConfig

from treespec.heads.head import Config, Head, Tensors
from treespec.heads.llama import LlamaHead

LLAMA_SIZE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
)


def build_llama_fields(head: LlamaHead, served: PretrainedConfig) -> Config:
    """Describe a head's decoder layer as a Llama of one layer; a writer overrides fields that differ.

    The rotary positions stand there in three forms, because versions of the engines read different
    fields. The context is at least the target's: the engines stop at the end of the shorter one.

    Args:
        head: the head that is exported.
        served: the config of the target that an engine runs the head with.
    """
    # 1. Rotary positions.
    llama = head.llama
    rope: Config = dict(llama.rope_parameters or {})
    kind = rope["rope_type"]
    scaling = None
    if kind != "default":
        scaling = dict(rope)
        scaling.pop("rope_theta")
        scaling["type"] = kind

    # 2. The fields, in the order of config.json.
    context: int | None = getattr(served.get_text_config(), "max_position_embeddings", None)
    fields: Config = {"model_type": "llama", "num_hidden_layers": 1}
    for name in LLAMA_SIZE_FIELDS:
        fields[name] = getattr(llama, name)
    fields["max_position_embeddings"] = max(llama.max_position_embeddings, context or 0)
    fields["rope_theta"] = rope["rope_theta"]
    fields["rope_scaling"] = scaling
    fields["rope_parameters"] = rope
    fields["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    fields["attention_bias"] = False
    fields["mlp_bias"] = False
    fields["tie_word_embeddings"] = False
    fields["torch_dtype"] = name_dtype(head)
    return fields


def name_dtype(head: Head) -> str:
    """Name the dtype of a head's weights as config.json does, such as "bfloat16"."""
    return str(head.dtype).removeprefix("torch.")


def check_layer(
    head: LlamaHead,
    *,
    has_bias_field: bool = False,
    any_activation: bool = False,
    rotary_types: tuple[str, ...] = (),
) -> None:
    """Refuse a decoder layer that a format cannot describe, or whose project does not compute it.

    Args:
        head: the head that is exported.
        has_bias_field: whether the format has a field for biases of queries, keys and values.
        any_activation: whether the project reads the activation; the engines have only silu.
        rotary_types: types of rotary positions that the project computes; (): all types, and
            `partial_rotary_factor`.

    Raises:
        ValueError: for a part that the format cannot describe.
    """
    llama = head.llama
    scale = head.config.get("embed_scale", 1.0)
    if scale != 1:
        raise ValueError(
            f"its target's embeddings are scaled by {scale:g}, for which there is no field"
        )
    if head.config.get("qkv_bias") and not has_bias_field:
        raise ValueError("its queries, keys and values have biases, for which there is no field")
    if llama.hidden_act != "silu" and not any_activation:
        raise ValueError(f"its activation is {llama.hidden_act}, where the engines have silu")
    if rotary_types:
        check_rotary(head, rotary_types)


def check_rotary(head: LlamaHead, rotary_types: tuple[str, ...]) -> None:
    """Raises ValueError for rotary positions of another type, and if only part of an attention head is rotated."""
    rope: Config = dict(head.llama.rope_parameters or {})
    kind = rope.get("rope_type")
    if kind not in rotary_types:
        types = ", ".join(rotary_types)
        raise ValueError(f"its rotary positions are of type {kind!r}, which is none of {types}")
    part = rope.get("partial_rotary_factor", 1.0)
    if part != 1.0:
        raise ValueError(f"its partial_rotary_factor is {part}, which the project does not compute")


def check_own_output(head: Head) -> None:
    """Raises ValueError for an EAGLE-3 head that uses the target's output layer: the formats store the head's."""
    if head.lm_head is None:
        raise ValueError("it has the target's output layer, and the formats store one of its own")


def rename_tensors(tensors: Tensors, *patterns: tuple[str, str]) -> Tensors:
    """Rename each tensor by every (pattern, replacement) in turn.

    Raises ValueError if two tensors get the same name.
    """
    by_new_name: Tensors = {}
    for name, value in tensors.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        if name in by_new_name:
            raise ValueError(f"two tensors stand for {name}")
        by_new_name[name] = value
    return by_new_name
