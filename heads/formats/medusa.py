"""Medusa's heads of FasterDecoding/Medusa, alone or within a whole model, and of vLLM."""

import re

import torch
from torch import Tensor

from treespec.heads.formats.engines import Served
from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.known import BLOCK, WHOLE, medusa_heads
from treespec.heads.medusa import MedusaHead


def read(config: Config, tensors: Tensors) -> Stored:
    """Keep the heads' tensors only, and take missing config fields from their shapes.

    A file may hold more heads than its config says: published configs say 2 where there are 5.
    Raises ValueError for a file without the output layer of the first head.
    """
    if names := [name for name in tensors if name.startswith(WHOLE)]:
        tensors = {name.removeprefix(WHOLE): tensors[name] for name in names}
    if any(BLOCK.match(name) for name in tensors):
        config, tensors = _from_vllm(config, tensors)
    layers = config.get("medusa_num_layers", 1)
    by_shapes = {"medusa_num_heads": medusa_heads(tensors), "medusa_num_layers": layers}
    by_shapes |= _widths(tensors, f"0.{layers}.weight")
    config = config | {name: value for name, value in by_shapes.items() if name not in config}
    if type(heads := config["medusa_num_heads"]) is not int:
        raise ValueError(f"medusa_num_heads is {heads!r}, must be a number")
    if 0 < heads < by_shapes["medusa_num_heads"]:
        config = config | {"medusa_num_heads": by_shapes["medusa_num_heads"]}
    return config, tensors


def to_vllm(head: MedusaHead, served: Served) -> Stored:
    """For vLLM: blocks.{head}.layers.{block} and lm_heads.{head}."""
    layers = int(head.config.get("medusa_num_layers", 1))
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "medusa_num_heads": head.max_depth,
        "medusa_num_layers": layers,
        "medusa_fc_bias": True,
        "truncated_vocab_size": head.vocab_size,
        "torch_dtype": str(head.dtype).removeprefix("torch."),
    }
    named = {
        re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name): value
        for name, value in head.state_dict().items()
    }
    return config, {
        re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name): v for name, v in named.items()
    }


def _from_vllm(config: Config, tensors: Tensors) -> Stored:
    """Rename vLLM's tensors; blocks without biases get zeros."""
    layers = config.get("medusa_num_layers", config.get("num_hidden_layers", 1))
    config = config | {"medusa_num_layers": layers}
    if "num_heads" in config:
        config = config | {"medusa_num_heads": config["num_heads"]}
    named = {}
    for name, value in tensors.items():
        name = name.removeprefix("medusa_heads.")
        name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        named[re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{layers}.", name)] = value
    if not config.get("medusa_fc_bias", False):
        for name in [name for name in named if name.endswith(".linear.weight")]:
            named[f"{name.removesuffix('weight')}bias"] = torch.zeros_like(named[name][:, 0])
    return config, named


def _widths(tensors: Tensors, output: str) -> dict[str, int]:
    """hidden_size and vocab_size, from the first head's output layer [V, H]."""
    if output not in tensors:
        raise ValueError(f"the head lacks {output}; is it Medusa heads?")
    vocab_size, hidden_size = tensors[output].shape
    return {"hidden_size": hidden_size, "vocab_size": vocab_size}


def outputs(head: MedusaHead, features: Tensor, generator: torch.Generator) -> Tensor:
    """[K, T, V] logits of each head. features: [1, T, H]."""
    return torch.cat([head.step(i, features) for i in range(head.max_depth)])
