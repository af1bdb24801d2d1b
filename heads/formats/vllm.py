"""vLLM's EAGLE heads. Medusa's, whose names of tensors are vLLM's too, are in `formats.depths`.

vLLM refuses tensors that it does not know, and d2t of a head that drafts all tokens.
"""

import torch
from transformers import PretrainedConfig

from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle3_fields import (
    AUX_LAYERS_FIELD,
    EAGLE3_ARCHITECTURE,
    EAGLE3_QWEN3_ARCHITECTURE,
    build_eagle3_layer_fields,
    build_eagle3_own_fields,
    check_parts,
    list_head_parts,
)
from treespec.heads.formats.llama_fields import build_llama_fields, check_layer, check_own_output
from treespec.heads.formats.vocabulary import OUTPUT_TENSOR
from treespec.heads.head import Config, Stored, Tensors


def read_token_map(config: Config, tensors: Tensors) -> Stored:
    """Turn vLLM's `token_map`, the tokens that an EAGLE-1 head drafts, into d2t.

    Without `truncated_vocab_size` the map means nothing, and is dropped.
    """
    kept = dict(tensors)
    token_map = kept.pop("token_map", None)
    drafted = config.get("truncated_vocab_size") or 0
    if not 0 < drafted < config.get("vocab_size", 0):
        return config, kept
    config = config | {"draft_vocab_size": drafted}
    if token_map is not None:
        tokens = token_map.long()
        kept["d2t"] = tokens - torch.arange(len(tokens))
        if OUTPUT_TENSOR in kept and len(kept[OUTPUT_TENSOR]) > len(tokens):
            kept[OUTPUT_TENSOR] = kept[OUTPUT_TENSOR][tokens]
    return config, kept


def write_vllm_eagle(head: EagleHead, served: PretrainedConfig) -> Stored:
    """EAGLE-1: vLLM's `fc` has no bias. The field `bias` would give the attention one.

    Raises ValueError for a head whose `fc` has a bias other than zero.
    """
    check_layer(head, has_bias_field=True)
    config: Config = {"architectures": ["LlamaForCausalLM"]}
    config |= build_llama_fields(head, served)
    tensors = head.state_dict()
    bias = tensors.pop("fc.bias", None)
    if bias is not None and bias.any():
        raise ValueError(
            "fc.bias is not zero, vLLM's EAGLE-1 has none: train with --no-bias, or export to "
            "sglang"
        )
    config["bias"] = False
    config["qkv_bias"] = head.config.get("qkv_bias", False)
    return config, tensors


def write_vllm_eagle3(head: Eagle3Head, served: PretrainedConfig, to: str = "vllm") -> Stored:
    """EAGLE-3: vLLM has an architecture of its own for layers of Qwen3.

    to: the format whose parts are checked; llama.cpp's file is made of the same fields.
    """
    check_own_output(head)
    check_layer(head)
    check_parts(head, to)
    architecture = EAGLE3_ARCHITECTURE
    if "qk_norm" in list_head_parts(head):
        architecture = EAGLE3_QWEN3_ARCHITECTURE
    config: Config = {"architectures": [architecture]}
    config |= build_eagle3_layer_fields(head, served)
    config |= build_eagle3_own_fields(head, served)
    config[AUX_LAYERS_FIELD] = list(head.aux_layers)
    return config, head.state_dict()
