"""Medusa's heads of FasterDecoding/Medusa, alone or within a whole model, and of vLLM; Hydra's heads
of zankner/Hydra. Their configs lack some of the target's sizes, which the tensors' shapes tell.
"""

import torch
from transformers import PretrainedConfig

from treespec.heads.folder import BLOCK, HYDRA, WHOLE, medusa_heads
from treespec.heads.formats.engines import dtype_of, renamed
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.medusa import MedusaHead

# vLLM's blocks.{head}.layers.{block} and lm_heads.{head}
TO_VLLM = (
    (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
    (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
)
PREFIX = "prefix_embeding_layer."
LAYER = PREFIX + "layers.0."
OUTPUTS = ("hydra_lm_head.0.weight", "hydra_lm_head.0.1.weight")  # first head: Hydra's, Hydra++'s
ANGLES = LAYER + "self_attn.rotary_emb.inv_freq"  # [D / 2], which follows from the config
# The target's embedding, one of the prefix layer that is never read, and the angles.
UNUSED = {"input_embed_fn.weight", PREFIX + "embed_tokens.weight", ANGLES}


def read_medusa(config: Config, tensors: Tensors) -> Stored:
    """Keep the heads' tensors only, and take missing config fields from their shapes.

    A file may hold more heads than its config says: published configs say 2 where there are 5.
    Raises ValueError for a file without the output layer of the first head.
    """
    # 1. The heads alone, by their published names.
    if names := [name for name in tensors if name.startswith(WHOLE)]:
        tensors = {name.removeprefix(WHOLE): tensors[name] for name in names}
    if any(BLOCK.match(name) for name in tensors):
        config, tensors = _from_vllm(config, tensors)

    # 2. Their sizes.
    layers = config.get("medusa_num_layers", 1)
    output, count = f"0.{layers}.weight", medusa_heads(tensors)
    if output not in tensors:
        raise ValueError(f"the head lacks {output}; is it Medusa heads?")
    vocab_size, hidden_size = tensors[output].shape
    sizes = {"medusa_num_heads": count, "medusa_num_layers": layers}
    sizes |= {"hidden_size": hidden_size, "vocab_size": vocab_size}
    config = config | sizes | config
    if type(heads := config["medusa_num_heads"]) is not int:
        raise ValueError(f"medusa_num_heads is {heads!r}, must be a number")
    return config | {"medusa_num_heads": max(heads, count) if heads > 0 else heads}, tensors


def _from_vllm(config: Config, tensors: Tensors) -> Stored:
    """Rename vLLM's tensors; blocks without biases get zeros."""
    layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    config = config | {"medusa_num_layers": layers}
    if "num_heads" in config:
        config["medusa_num_heads"] = config["num_heads"]
    named = renamed(
        tensors,
        (r"^medusa_heads\.", ""),
        (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."),
        (r"^lm_heads\.(\d+)\.", rf"\1.{layers}."),
    )
    if not config.get("medusa_fc_bias", False):
        weights = {name: named[name] for name in named if name.endswith(".linear.weight")}
        for name, weight in weights.items():
            named[name.removesuffix("weight") + "bias"] = torch.zeros_like(weight[:, 0])
    return config, named


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
    if config.get("hidden_state_offset"):
        raise ValueError(
            f"hidden_state_offset is {config['hidden_state_offset']}, of which only 0 is known"
        )
    output = next((tensors[name] for name in OUTPUTS if name in tensors), None)
    if output is None:
        raise ValueError(f"the head lacks {OUTPUTS[0]}; is it Hydra or Hydra++ heads?")
    vocab_size, width = output.shape
    shapes = {name.removeprefix(LAYER): len(value) for name, value in tensors.items()}
    heads = medusa_heads(tensors, HYDRA)
    sizes = {"hydra_num_heads": heads, "hidden_size": width, "vocab_size": vocab_size}
    known: Config = config | sizes | config

    # 2. Of a prefix layer: the number of rotary angles, D / 2, tells the head count.
    if any(name.startswith(LAYER) for name in tensors):
        if "num_attention_heads" not in known:
            if ANGLES not in tensors:
                base = config.get("base_model_name_or_path", "the target")
                raise ValueError(
                    f"num_attention_heads is missing, and the file does not tell: add what {base} has"
                )
            known["num_attention_heads"] = width // (2 * len(tensors[ANGLES]))
        size = width // known["num_attention_heads"]
        if keys := shapes.get("self_attn.k_proj.weight"):
            known.setdefault("num_key_value_heads", keys // size)
        if inner := shapes.get("mlp.gate_proj.weight"):
            known.setdefault("intermediate_size", inner)
    return known, {name: value for name, value in tensors.items() if name not in UNUSED}
