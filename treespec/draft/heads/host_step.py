"""Finds the step of an EAGLE head as one C call, for heads all of whose parts the call computes.

The call computes one decoder layer, EAGLE-1's or EAGLE-3's, of a head that is packed for a CPU. The layer may have
biases, a window, and norms of queries and keys; the head may have EAGLE-3.1's norms, a draft vocabulary, and an output
layer. Any other head, as one with several layers, runs module by module; the bits are the same.
"""

import logging
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.kernels.checks import KernelInputError
from treespec.kernels.head_step import HeadWeights
from treespec.kernels.layers import LayerWeights
from treespec.kernels.ops import BFLOAT16_FLAGS, PackedWeight
from treespec.model.cpu.decoder_block import UnfusableError
from treespec.model.cpu.fused_layers import FusedHeadForward
from treespec.model.cpu.head_step import HeadStep
from treespec.model.cpu.packed_embedding import PackedEmbedding
from treespec.model.cpu.packed_layers import PackedLinear, PackedNorm, has_own_code
from treespec.model.target import Target

log = logging.getLogger(__name__)


def find_head_step(head: Any, target: Target) -> HeadStep | None:
    """Returns the head's step as one C call; None if it has parts that the call does not compute: the log names one.

    head: attached to the target.
    """
    try:
        return HeadStep(read_head(head, target), head.decoder[0].self_attn.window)
    except (UnfusableError, KernelInputError) as error:
        log_refusal(type(head).__name__, str(error))
        return None


@lru_cache
def log_refusal(head_name: str, reason: str) -> None:
    """Logs why a head's steps run module by module; once, although each text asks for the head's step."""
    log.info("a step of %s runs module by module: %s", head_name, reason)


def read_head(head: Any, target: Target) -> HeadWeights:
    """Reads the weights of a head's step. Raises UnfusableError, which names a part that the call does not compute."""
    # 1. The kind of the head, and its embedding.
    dtype = target.dtype
    kind = type(head)
    if kind not in (EagleHead, Eagle3Head) or dtype not in BFLOAT16_FLAGS:
        raise UnfusableError(f"it is no EAGLE head, or {dtype} is no dtype of the kernels")
    if head.embed_scale != 1:
        raise UnfusableError(f"it multiplies embeddings by {head.embed_scale}")
    embedding = read_embedding(head.embed_tokens)

    # 2. The layer, and the output layer. A head without one has that of the target.
    if len(head.decoder) > 1:
        raise UnfusableError(f"it has {len(head.decoder)} layers")
    (layer,) = head.decoder
    layer_weights = read_fused_layer(layer)
    output = head.lm_head
    if output is None:
        row = head.embed_tokens(torch.zeros(1, dtype=torch.int64, device="cpu"))
        output = target.output_path.find_product(row, head.output)
    check_packed(output, "the output layer", dtype)
    parts: dict[str, Any] = {
        "layer": layer_weights,
        "embedding": embedding,
        "output": output.read_weight(),
        "output_bias": output.bias,
    }

    # 3. What lies before the layer, and the norms around it.
    if kind is EagleHead:
        check_packed(head.fc, "fc", dtype)
        return HeadWeights(**parts, fc=head.fc.read_weight(), fc_bias=head.fc.bias)
    norms = (layer.input_layernorm, layer.hidden_norm, head.norm)
    return HeadWeights(
        **parts,
        norms=[read_norm(norm, layer_weights) for norm in norms],
        adds_normed_feature=layer.norm_before_residual,
        returns_normed_states=head.norm_output,
    )


def read_embedding(embedding: Any) -> Tensor | PackedWeight:
    """Returns the weight of an embedding. Raises UnfusableError unless it only copies rows."""
    if type(embedding) is PackedEmbedding and has_own_code(embedding):
        return embedding.read_weight()
    is_plain = type(embedding) is nn.Embedding and embedding.max_norm is None
    if not is_plain or not has_own_code(embedding):
        raise UnfusableError("its embedding does more than copy rows")
    weight: Tensor = embedding.weight
    return weight.detach()


def read_fused_layer(layer: Any) -> LayerWeights:
    """Returns the weights of a head's layer. Raises UnfusableError unless a C call computes all of it."""
    forward = vars(layer).get("forward")
    if not isinstance(forward, FusedHeadForward):
        raise UnfusableError("its layer does not run as one C call")
    if layer._forward_hooks or layer._forward_pre_hooks or not forward.parts.is_unchanged():
        raise UnfusableError("its layer has hooks, or other parts than when it was fused")
    (weights,) = forward.stack.layers
    return weights


def check_packed(product: Any, name: str, dtype: torch.dtype) -> None:
    """Raises UnfusableError unless a linear layer is packed, for inputs and biases of that dtype, without hooks."""
    if type(product) is not PackedLinear or not has_own_code(product) or product.dtype != dtype:
        raise UnfusableError(f"{name} does more than multiply by a packed weight of {dtype}")


def read_norm(norm: Any, layer: LayerWeights) -> Tensor:
    """Returns the weight of a norm. Raises UnfusableError if it is not packed, has hooks, or another epsilon."""
    if type(norm) is not PackedNorm or not has_own_code(norm) or norm.eps != layer.eps:
        raise UnfusableError("a norm is not packed, has hooks, or another epsilon than its layer's")
    return norm.weight.detach()
