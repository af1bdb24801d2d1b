"""What the readers of heads with layers of Llama and Qwen3 share: sizes and biases that the tensors tell.

Where config.json and the tensors disagree about a size, the tensors decide: published configs say 40
layers for a head of one.
"""

import re

from transformers import Qwen3Config

from treespec.heads.formats.fields import drop_names, select_names
from treespec.heads.formats.llama_fields import LLAMA_SIZE_FIELDS
from treespec.heads.head import Config, Tensors

VERIFIER_TENSORS = (
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)  # copies of the target's, not used
QKV_NAMES = ("q_proj", "k_proj", "v_proj")
QWEN3_SIZES = LLAMA_SIZE_FIELDS + ("max_position_embeddings",)


def as_qwen3(config: Config) -> Config:
    """A config of Qwen3 layers as treespec's: Llama's fields, with Qwen3's own defaults.

    transformers of earlier versions leave out what equals a default, and Llama's differ.
    """
    defaults = select_names(Qwen3Config().to_dict(), QWEN3_SIZES)
    return defaults | config | {"model_type": "llama", "qk_norm": True}


def derive_biases(config: Config, tensors: Tensors, layer: str) -> Config:
    """The config with `qkv_bias` as the tensors have it. layer: the name of the first one.

    Raises ValueError for a config that says that there are biases, where the file has none.
    """
    stored = all(f"{layer}.self_attn.{name}.bias" in tensors for name in QKV_NAMES)
    if stored:
        return drop_names(config, ("attention_bias",)) | {"qkv_bias": True}
    for name in ("attention_bias", "qkv_bias"):
        if config.get(name):
            raise ValueError(
                f"{name} is true, and the file has no biases of queries, keys and values"
            )
    return config


def derive_sizes(config: Config, tensors: Tensors, layer: str) -> Config:
    """The config with the widths that a layer's tensors have, where it says others. layer: its name."""
    gate = tensors.get(f"{layer}.mlp.gate_proj.weight")
    if gate is not None and config.get("intermediate_size") not in (None, len(gate)):
        config = config | {"intermediate_size": len(gate)}
    queries = tensors.get(f"{layer}.self_attn.q_proj.weight")
    keys = tensors.get(f"{layer}.self_attn.k_proj.weight")
    if queries is None or keys is None:
        return config
    return derive_heads(config, len(queries), len(keys))


def derive_heads(config: Config, query_rows: int, key_rows: int) -> Config:
    """The config with the width of a head and the number of key heads that the rows of queries and keys have."""
    heads = config.get("num_attention_heads")
    width = config.get("hidden_size")
    if not heads or not width:
        return config
    size = config.get("head_dim")
    if not size:
        size = query_rows // heads
        if size * heads == query_rows and size != width // heads:
            config = config | {"head_dim": size}
    groups = config.get("num_key_value_heads") or heads
    if groups * size != key_rows and key_rows % size == 0:
        config = config | {"num_key_value_heads": key_rows // size}
    return config


def count_layers(config: Config, tensors: Tensors, before: int = 0) -> Config:
    """The config with the number of layers that the tensors have. before: those with other names."""
    count = before
    for name in tensors:
        numbered = re.match(r"layers\.(\d+)\.", name)
        if numbered:
            count = max(count, int(numbered[1]) + 1)
    if count and config.get("num_hidden_layers", 1) != count:
        return config | {"num_hidden_layers": count}
    return config


def check_window(config: Config) -> None:
    """Raises ValueError for a window without `layer_types`, which says which layers have it."""
    if (
        config.get("use_sliding_window")
        and config.get("sliding_window")
        and not config.get("layer_types")
    ):
        raise ValueError(
            "use_sliding_window is true, and layer_types does not say for which layers: add it, or set "
            "use_sliding_window to false"
        )
