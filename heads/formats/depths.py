"""Medusa's heads of FasterDecoding/Medusa, alone or within a whole model, and of vLLM; Hydra's heads
of zankner/Hydra. Their configs lack some of the target's sizes, which the tensors' shapes tell.
"""

import torch
from transformers import PretrainedConfig

from treespec.heads.folder import BLOCK, WHOLE, hydra_levels, medusa_levels
from treespec.heads.formats import fields
from treespec.heads.formats.engines import dtype_of, renamed
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
OUTPUT, PLUS = (
    "hydra_lm_head.0.weight",
    "hydra_lm_head.0.1.weight",
)  # first head: Hydra's, Hydra++'s
PREFIX = "prefix_embeding_layer."
LAYER = PREFIX + "layers.0."
ANGLES = LAYER + "self_attn.rotary_emb.inv_freq"  # [D / 2], which follows from the config
# The target's embedding, one of the prefix layer that is never read, and the angles.
UNUSED = {"input_embed_fn.weight", PREFIX + "embed_tokens.weight", ANGLES}


def read_medusa(config: Config, tensors: Tensors) -> Stored:
    """Keep the heads' tensors only, and take missing config fields from their shapes.

    A file may hold more heads than its config says: published configs say 2 where there are 5.
    Of vLLM's it renames the tensors; blocks without biases get zeros.
    """
    # 1. The heads alone, by their published names.
    layers = config.get("medusa_num_layers", 1)
    config, tensors = take_out_heads(config, tensors)
    fields.MEDUSA_TABLE.check(config)
    drafted = config.get("truncated_vocab_size")
    if drafted not in (None, config.get("vocab_size")):
        raise ValueError(
            f"truncated_vocab_size is {drafted} of {config.get('vocab_size')}: treespec's Medusa heads draft "
            "all tokens"
        )
    if any(map(BLOCK.match, tensors)):
        layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
        patterns = [(pattern, new.format(layers=layers)) for pattern, new in FROM_VLLM]
        tensors = renamed(tensors, *patterns)
        for name in [*tensors] if not config.get("medusa_fc_bias") else ():
            if name.endswith(".linear.weight"):
                bias = torch.zeros_like(tensors[name][:, 0])
                tensors[name.removesuffix("weight") + "bias"] = bias

    # 2. Their sizes.
    vocab_size, hidden_size = tensors[f"0.{layers}.weight"].shape
    sizes = {"hidden_size": hidden_size, "vocab_size": vocab_size, "medusa_num_layers": layers}
    return config | sizes | config | {"medusa_num_heads": medusa_levels(config, tensors)}, tensors


def take_out_heads(config: Config, tensors: Tensors) -> Stored:
    """The heads of a whole model, whose config is the model's; other files as they are."""
    heads = {name.removeprefix(WHOLE): tensors[name] for name in tensors if name.startswith(WHOLE)}
    if not heads:
        return config, tensors
    return {name: config[name] for name in config if name.startswith("medusa")}, heads


def write_medusa(head: MedusaHead, served: PretrainedConfig, to: str) -> Stored:
    """For vLLM."""
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "medusa_num_heads": head.max_depth,
        "medusa_num_layers": head.blocks,
        "medusa_fc_bias": True,
        "truncated_vocab_size": head.vocab_size,
        "torch_dtype": dtype_of(head),
    }
    return config, renamed(head.state_dict(), *TO_VLLM)


def read_hydra(config: Config, tensors: Tensors) -> Stored:
    """Drop the unused tensors, and take missing config fields from the shapes of the others.

    Raises ValueError for features of another layer than the last, and if neither the config nor the
    tensors tell the number of attention heads of the prefix layer.
    """
    # 1. What the config and the first head tell.
    prefixed = LAYER + "mlp.gate_proj.weight" in tensors
    (fields.HYDRA_PLUS_TABLE if prefixed else fields.HYDRA_TABLE).check(config)
    config = read_rotary(config)
    vocab_size, width = tensors[PLUS if PLUS in tensors else OUTPUT].shape
    heads = hydra_levels(config, tensors)
    sizes = {"hydra_num_heads": heads, "hidden_size": width, "vocab_size": vocab_size}
    known: Config = config | sizes | config

    # 2. Of a prefix layer: the number of rotary angles, D / 2, tells the head count.
    if prefixed:
        if "num_attention_heads" not in known:
            if ANGLES not in tensors:
                base = config.get("base_model_name_or_path", "the target")
                raise ValueError(
                    f"num_attention_heads is missing, and the file does not tell: add what {base} has"
                )
            known["num_attention_heads"] = width // (2 * len(tensors[ANGLES]))
        keys, inner = (
            len(tensors[f"{LAYER}{name}.weight"]) for name in ("self_attn.k_proj", "mlp.gate_proj")
        )
        known.setdefault("num_key_value_heads", keys * known["num_attention_heads"] // width)
        known.setdefault("intermediate_size", inner)
    return known, {name: value for name, value in tensors.items() if name not in UNUSED}
