"""Shared by the readers of heads with Llama's or Qwen3's layers: derive sizes and biases from the tensors.

If config.json and the tensors disagree about a size, the tensors decide: some published configs say 40
layers for a head of one layer.
"""

import re

from transformers import Qwen3Config

from treespec.heads.formats.fields import drop_names, select_names
from treespec.heads.formats.llama_fields import LLAMA_SIZE_FIELDS
from treespec.heads.head import Config, Tensors

# Copies of the target's tensors, not used.
VERIFIER_TENSORS = (
    "verifier_lm_head.weight",
    "verifier_norm.weight",
)
QKV_NAMES = ("q_proj", "k_proj", "v_proj")
QWEN3_SIZES = LLAMA_SIZE_FIELDS + ("max_position_embeddings",)


def as_qwen3(config: Config) -> Config:
    """Turn a config of Qwen3 layers into treespec's: Llama's fields, with Qwen3's defaults.

    Earlier versions of transformers leave out fields that equal Qwen3's defaults; Llama's defaults differ.
    """
    defaults = select_names(Qwen3Config().to_dict(), QWEN3_SIZES)
    return defaults | config | {"model_type": "llama", "qk_norm": True}


def derive_biases(config: Config, tensors: Tensors, layer: str) -> Config:
    """Set `qkv_bias` to whether the tensors have biases. layer: the first layer's name.

    Raises ValueError if the config says that there are biases, and the file has none.
    """
    has_biases = all(f"{layer}.self_attn.{name}.bias" in tensors for name in QKV_NAMES)
    if has_biases:
        return drop_names(config, ("attention_bias",)) | {"qkv_bias": True}
    for name in ("attention_bias", "qkv_bias"):
        if config.get(name):
            raise ValueError(
                f"{name} is true, and the file has no biases of queries, keys and values"
            )
    return config


def derive_sizes(config: Config, tensors: Tensors, layer: str) -> Config:
    """Correct the widths in a config by a layer's tensors. layer: the layer's name."""
    gate = tensors.get(f"{layer}.mlp.gate_proj.weight")
    if gate is not None and config.get("intermediate_size") not in (None, len(gate)):
        config = config | {"intermediate_size": len(gate)}
    queries = tensors.get(f"{layer}.self_attn.q_proj.weight")
    keys = tensors.get(f"{layer}.self_attn.k_proj.weight")
    if queries is None or keys is None:
        return config
    return derive_heads(config, len(queries), len(keys))


def derive_heads(config: Config, query_rows: int, key_rows: int) -> Config:
    """Correct `head_dim` and `num_key_value_heads` in a config by the rows of the query and key projections."""
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
    """Correct the number of layers in a config by the tensors' names.

    before: the number of layers with other names than layers.N.
    """
    count = before
    for name in tensors:
        numbered = re.match(r"layers\.(\d+)\.", name)
        if numbered:
            count = max(count, int(numbered[1]) + 1)
    if count and config.get("num_hidden_layers", 1) != count:
        return config | {"num_hidden_layers": count}
    return config


def check_window(config: Config) -> None:
    """Raises ValueError for a window without `layer_types`: nothing says then which layers have it."""
    if (
        config.get("use_sliding_window")
        and config.get("sliding_window")
        and not config.get("layer_types")
    ):
        raise ValueError(
            "use_sliding_window is true, and layer_types does not say for which layers: add it, or set "
            "use_sliding_window to false"
        )
