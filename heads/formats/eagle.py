"""EAGLE-1 and EAGLE-2 heads of SafeAILab/EAGLE, whose format is this repository's, and of the engines."""

from typing import Any

import torch
from torch import Tensor

from treespec.heads.eagle import EagleHead
from treespec.heads.formats.engines import Served, llama_fields


def read(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A head of vLLM's own architecture has no `fc.bias`, and need not say so."""
    if config.get("architectures") == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors:
        config = config | {"bias": False}
    return config, tensors


def to_eagle(head: EagleHead, served: Served) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """For SafeAILab/EAGLE."""
    biases = {"bias": head.fc.bias is not None, "qkv_bias": head.config.get("qkv_bias", False)}
    return _config(head, served, "LlamaForCausalLM") | biases, head.state_dict()


def to_vllm(head: EagleHead, served: Served) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """For vLLM, whose `fc` has no bias, and where `bias` would give one to the attention."""
    if head.fc.bias is not None and head.fc.bias.any():
        raise ValueError("fc.bias is not zero, vLLM's EAGLE-1 has none: train with --no-bias, or export to sglang")
    tensors = {name: value for name, value in head.state_dict().items() if name != "fc.bias"}
    biases = {"bias": False, "qkv_bias": head.config.get("qkv_bias", False)}
    return _config(head, served, "LlamaForCausalLM") | biases, tensors


def to_sglang(head: EagleHead, served: Served) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """For SGLang, whose `fc` has a bias in any case, and where `bias` would give one to the attention."""
    zeros = torch.zeros(head.hidden_size, dtype=head.dtype)
    return _config(head, served, "LlamaForCausalLMEagle"), {"fc.bias": zeros} | head.state_dict()


def _config(head: EagleHead, served: Served, architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture]} | llama_fields(head, served)
