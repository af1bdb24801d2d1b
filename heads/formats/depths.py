"""Formats of Medusa's heads (FasterDecoding/Medusa, also within a whole model, and vLLM) and Hydra's (zankner/Hydra).

Their configs lack some sizes of the target. These follow from the tensors' shapes.
"""

import torch
from transformers import PretrainedConfig

from treespec.heads.folder import (
    VLLM_BLOCK_PATTERN,
    WHOLE_MODEL_PREFIX,
    count_hydra_levels,
    count_medusa_levels,
)
from treespec.heads.formats import fields
from treespec.heads.formats.llama_fields import name_dtype, rename_tensors
from treespec.heads.formats.rotary import read_rotary
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.medusa import MedusaHead

# vLLM's blocks.{head}.layers.{block} and lm_heads.{head}
TO_VLLM = (
    (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
)
FROM_VLLM = (
    (r"^medusa_heads\.", ""),
    (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."),
    (r"^lm_heads\.(\d+)\.", r"\1.{layers}."),
)
HYDRA_OUTPUT_PATTERN = "hydra_lm_head.0.weight"  # the output layer of Hydra's first head
PLUS = "hydra_lm_head.0.1.weight"  # the same in Hydra++
HYDRA_PREFIX = "prefix_embeding_layer."
HYDRA_PREFIX_LAYER = HYDRA_PREFIX + "layers.0."
ROTARY_BUFFER = (
    HYDRA_PREFIX_LAYER + "self_attn.rotary_emb.inv_freq"
)  # [D / 2], which follows from the config
# The target's embedding, the prefix layer's embedding, which is never read, and the rotary frequencies.
UNUSED_TENSORS = {"input_embed_fn.weight", HYDRA_PREFIX + "embed_tokens.weight", ROTARY_BUFFER}


def read_medusa(config: Config, tensors: Tensors) -> Stored:
    """Read Medusa's heads: keep only their tensors, and derive missing config fields from the shapes.

    A file may hold more heads than its config says: published configs say 2 for files with 5.
    vLLM's tensors are renamed, and its blocks without biases get zeros.
    """
    # 1. The heads' tensors, by their published names.
    layers: int = config.get("medusa_num_layers", 1)
    config, tensors = take_out_heads(config, tensors)
    fields.MEDUSA_TABLE.check(config)
    drafted = config.get("truncated_vocab_size")
    if drafted not in (None, config.get("vocab_size")):
        raise ValueError(
            f"truncated_vocab_size is {drafted} of {config.get('vocab_size')}: treespec's Medusa heads draft "
            "all tokens"
        )
    if any(map(VLLM_BLOCK_PATTERN.match, tensors)):
        if "medusa_num_layers" not in config:
            layers = config.get("num_hidden_layers", 1)
        tensors = rename_from_vllm(tensors, layers)
        if not config.get("medusa_fc_bias"):
            tensors |= make_zero_biases(tensors)

    # 2. Sizes that the config lacks.
    vocab_size, hidden_size = tensors[f"0.{layers}.weight"].shape
    config = dict(config)
    config.setdefault("hidden_size", hidden_size)
    config.setdefault("vocab_size", vocab_size)
    config.setdefault("medusa_num_layers", layers)
    config["medusa_num_heads"] = count_medusa_levels(config, tensors)
    return config, tensors


def take_out_heads(config: Config, tensors: Tensors) -> Stored:
    """Extract Medusa's heads from a whole model with the model's config; other files stay as they are."""
    heads: Tensors = {}
    for name, value in tensors.items():
        if name.startswith(WHOLE_MODEL_PREFIX):
            heads[name.removeprefix(WHOLE_MODEL_PREFIX)] = value
    if not heads:
        return config, tensors
    medusa_fields = {name: value for name, value in config.items() if name.startswith("medusa")}
    return medusa_fields, heads


def rename_from_vllm(tensors: Tensors, layers: int) -> Tensors:
    """Rename vLLM's tensors to Medusa's published names. layers: the number of residual blocks in each head."""
    patterns = [(pattern, new.format(layers=layers)) for pattern, new in FROM_VLLM]
    return rename_tensors(tensors, *patterns)


def make_zero_biases(tensors: Tensors) -> Tensors:
    """Make a bias of zeros for each residual block: vLLM's blocks have none."""
    biases: Tensors = {}
    for name, weight in tensors.items():
        if name.endswith(".linear.weight"):
            biases[name.removesuffix("weight") + "bias"] = torch.zeros_like(weight[:, 0])
    return biases


def write_medusa(head: MedusaHead, served: PretrainedConfig, to: str) -> Stored:
    """Write config.json and the tensors of Medusa's heads, for vLLM."""
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "medusa_num_heads": head.max_depth,
        "medusa_num_layers": head.blocks,
        "medusa_fc_bias": True,
        "truncated_vocab_size": head.vocab_size,
        "torch_dtype": name_dtype(head),
    }
    return config, rename_tensors(head.state_dict(), *TO_VLLM)


def read_hydra(config: Config, tensors: Tensors) -> Stored:
    """Read Hydra's heads: drop unused tensors, and derive missing config fields from the shapes of the others.

    Raises ValueError for features of another layer than the last, and if neither the config nor the
    tensors say the number of attention heads of the prefix layer.
    """
    # 1. Sizes by the config and the first head.
    prefixed = f"{HYDRA_PREFIX_LAYER}mlp.gate_proj.weight" in tensors
    table = fields.HYDRA_TABLE
    if prefixed:
        table = fields.HYDRA_PLUS_TABLE
    table.check(config)
    config = dict(read_rotary(config))
    output = HYDRA_OUTPUT_PATTERN
    if PLUS in tensors:
        output = PLUS
    vocab_size, width = tensors[output].shape
    config.setdefault("hydra_num_heads", count_hydra_levels(config, tensors))
    config.setdefault("hidden_size", width)
    config.setdefault("vocab_size", vocab_size)

    # 2. A prefix layer's sizes.
    if prefixed:
        derive_prefix_sizes(config, tensors, width)
    return config, fields.drop_names(tensors, UNUSED_TENSORS)


def derive_prefix_sizes(config: Config, tensors: Tensors, width: int) -> None:
    """Add missing sizes of Hydra++'s prefix layer to a config, in place. width: H.

    The number of attention heads follows from the number of rotary frequencies, D / 2. Raises ValueError if
    neither the config nor the file has it.
    """
    if "num_attention_heads" not in config:
        if ROTARY_BUFFER not in tensors:
            base = config.get("base_model_name_or_path", "the target")
            raise ValueError(
                f"num_attention_heads is missing, and the file does not tell: add what {base} has"
            )
        config["num_attention_heads"] = width // (2 * len(tensors[ROTARY_BUFFER]))
    key_rows = len(tensors[f"{HYDRA_PREFIX_LAYER}self_attn.k_proj.weight"])
    inner = len(tensors[f"{HYDRA_PREFIX_LAYER}mlp.gate_proj.weight"])
    config.setdefault("num_key_value_heads", key_rows * config["num_attention_heads"] // width)
    config.setdefault("intermediate_size", inner)
