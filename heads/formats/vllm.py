"""vLLM's format of EAGLE heads. Its format of Medusa's heads is in `formats.depths`.

vLLM refuses unknown tensors, and d2t in a head that drafts all tokens.
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
    """Turn vLLM's `token_map`, the draft vocabulary of an EAGLE-1 head, into d2t.

    Without `truncated_vocab_size` the map has no effect, and is dropped.
    """
    head_tensors = dict(tensors)
    token_map = head_tensors.pop("token_map", None)
    drafted = config.get("truncated_vocab_size") or 0
    if not 0 < drafted < config.get("vocab_size", 0):
        return config, head_tensors
    config = config | {"draft_vocab_size": drafted}
    if token_map is not None:
        tokens = token_map.long()
        head_tensors["d2t"] = tokens - torch.arange(len(tokens), device="cpu")
        if OUTPUT_TENSOR in head_tensors and len(head_tensors[OUTPUT_TENSOR]) > len(tokens):
            head_tensors[OUTPUT_TENSOR] = head_tensors[OUTPUT_TENSOR][tokens]
    return config, head_tensors


def write_vllm_eagle(head: EagleHead, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-1 head.

    vLLM's `fc` has no bias, and its field `bias` means the attention's. Raises ValueError for a head whose
    `fc` has a bias other than zero.
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
    """Write config.json and the tensors of an EAGLE-3 head. vLLM has a separate architecture for Qwen3's layers.

    to: the format whose parts are checked; llama.cpp's file is built from the same fields.
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
