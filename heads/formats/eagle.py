"""EAGLE-1 and EAGLE-2 heads: SafeAILab/EAGLE's format, which is treespec's, and the engines'."""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from treespec.heads.eagle import EagleHead
from treespec.heads.features import FeatureHead
from treespec.heads.formats.engines import Served, check_layer, check_norms, llama_fields
from treespec.heads.head import Config, Stored, Tensors

ROTARY = ("default", "linear", "dynamic")  # the types that SafeAILab/EAGLE computes


def read(config: Config, tensors: Tensors) -> Stored:
    """Add `bias: false` for a head of vLLM's architecture, whose config may omit it.

    Raises ValueError for norms that the head does not have.
    """
    check_norms(config, EagleHead.known_as, has=False)
    if config.get("architectures") == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors:
        config = config | {"bias": False}
    return config, tensors


def to_eagle(head: EagleHead, served: Served) -> Stored:
    """For SafeAILab/EAGLE."""
    check_layer(head, biases=True, activation=None)
    check_project(head)
    biases = {"bias": head.fc.bias is not None, "qkv_bias": head.config.get("qkv_bias", False)}
    return _config(head, served, "LlamaForCausalLM") | biases, head.state_dict()


def to_vllm(head: EagleHead, served: Served) -> Stored:
    """For vLLM: `fc` has no bias, and the field `bias` would give the attention one."""
    check_layer(head, biases=True)
    if head.fc.bias is not None and head.fc.bias.any():
        raise ValueError(
            "fc.bias is not zero, vLLM's EAGLE-1 has none: train with --no-bias, or export to "
            "sglang"
        )
    tensors = {name: value for name, value in head.state_dict().items() if name != "fc.bias"}
    biases = {"bias": False, "qkv_bias": head.config.get("qkv_bias", False)}
    return _config(head, served, "LlamaForCausalLM") | biases, tensors


def to_sglang(head: EagleHead, served: Served) -> Stored:
    """For SGLang: `fc` always has a bias, and the field `bias` would give the attention one."""
    check_layer(head)
    zeros = torch.zeros(head.hidden_size, dtype=head.dtype)
    return _config(head, served, "LlamaForCausalLMEagle"), {"fc.bias": zeros} | head.state_dict()


def _config(head: EagleHead, served: Served, architecture: str) -> Config:
    return {"architectures": [architecture]} | llama_fields(head, served)


def check_project(head: FeatureHead) -> None:
    """Raises ValueError for a layer that SafeAILab/EAGLE does not compute."""
    llama = LlamaConfig(**head.config)
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


class Unchanged:
    """A target whose output path leaves EAGLE-1's features as they are."""

    def output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        return hidden

    def output_rows(self, tokens: Tensor) -> nn.Linear:
        raise NotImplementedError


def outputs(head: FeatureHead, features: Tensor, generator: torch.Generator) -> Tensor:
    """[2, T, N] logits of two steps, step 2 on the head's own features; of EAGLE-1 the features.

    features: [1, T, F].
    """
    # 1. Random tokens, and a random embedding for a head that shares its target's.
    count = features.shape[1]
    tokens = torch.randint(head.vocab_size, (1, count + 1), generator=generator)
    if head.lacks_embedding:
        weight = torch.randn(head.vocab_size, head.hidden_size, generator=generator)
        head.share_embedding(nn.Parameter(weight, requires_grad=False))

    # 2. Two steps at positions far apart, so that another rotary scaling gives other logits.
    hidden, steps = head.fuse(features), []
    for step in range(2):
        positions = 97 * torch.arange(step, step + count)
        hidden = head.step(tokens[:, step : step + count], hidden, positions)
        steps.append(head.logits(hidden, Unchanged()))
    return torch.cat(steps)
