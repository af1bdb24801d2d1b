"""EAGLE-1 and EAGLE-2 heads: SafeAILab/EAGLE's format, which is treespec's, and the engines'."""

import torch
from torch import Tensor, nn

from treespec.heads.eagle import EagleHead
from treespec.heads.features import FeatureHead
from treespec.heads.formats.engines import Served, check_layer, check_norms, llama_fields
from treespec.heads.head import Config, Stored, Tensors


def read(config: Config, tensors: Tensors) -> Stored:
    """Add `bias: false` for a head of vLLM's architecture, whose config may omit it.

    Raises ValueError for norms that the head does not have.
    """
    check_norms(config, EagleHead.known_as, has=False)
    if config.get("architectures") == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors:
        config = config | {"bias": False}
    return config, tensors


def write(head: EagleHead, served: Served, to: str) -> Stored:
    """For SafeAILab/EAGLE, vLLM or SGLang.

    The `fc` of vLLM has no bias, that of SGLang always one; in both the field `bias` would give the
    attention one.
    """
    # 1. What all have.
    check_layer(head, to, biases=to != "sglang")
    architecture = "LlamaForCausalLMEagle" if to == "sglang" else "LlamaForCausalLM"
    config = {"architectures": [architecture]} | llama_fields(head, served)
    tensors = head.state_dict()
    if to == "sglang":
        zeros = torch.zeros(head.hidden_size, dtype=head.dtype)
        return config, {"fc.bias": zeros} | tensors

    # 2. The biases.
    biased = to == "eagle" and head.fc.bias is not None
    if not biased and (bias := tensors.pop("fc.bias", None)) is not None and bias.any():
        raise ValueError(
            "fc.bias is not zero, vLLM's EAGLE-1 has none: train with --no-bias, or export to "
            "sglang"
        )
    return config | {"bias": biased, "qkv_bias": head.config.get("qkv_bias", False)}, tensors


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
