"""SGLang's EAGLE heads, and how it numbers the target's layers.

SGLang names the layer that a feature leaves, treespec the one that it enters (`formats.eagle` draws
both). It stores the layers in `eagle_config`, and requires `draft_vocab_size`.
"""

import torch
from transformers import PretrainedConfig

from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle3_fields import (
    AUX_LAYERS_FIELD,
    EAGLE3_ARCHITECTURE,
    build_eagle3_layer_fields,
    build_eagle3_own_fields,
    check_parts,
)
from treespec.heads.formats.llama_fields import (
    build_llama_fields,
    check_layer,
    check_own_output,
    rename_tensors,
)
from treespec.heads.head import Config, Stored

TO_SGLANG = (r"^(layers\.\d+\.)input_layernorm\.", r"\1hidden_norm.")  # a norm of later layers


def from_sglang(ids: list[int]) -> list[int]:
    """Translate SGLang's layer ids to aux layers."""
    return [int(k) + 1 for k in ids]


def to_sglang_ids(aux_layers: tuple[int, ...]) -> list[int]:
    """Translate aux layers to SGLang's ids.

    Raises ValueError for the embedding, which no layer puts out.
    """
    if 0 in aux_layers:
        raise ValueError("it reads the target's embedding, which SGLang cannot: export it to vllm")
    return [k - 1 for k in aux_layers]


def write_sglang_eagle(head: EagleHead, served: PretrainedConfig) -> Stored:
    """EAGLE-1: SGLang's `fc` always has a bias, and the field `bias` would give the attention one."""
    check_layer(head)
    config = {"architectures": ["LlamaForCausalLMEagle"]} | build_llama_fields(head, served)
    tensors = {"fc.bias": torch.zeros(head.hidden_size, dtype=head.dtype)}
    return config, tensors | head.state_dict()


def write_sglang_eagle3(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """EAGLE-3: the layer ids stand in `eagle_config`, a norm of later layers has SGLang's name."""
    check_own_output(head)
    check_layer(head)
    check_parts(head, "sglang")
    config: Config = {"architectures": [EAGLE3_ARCHITECTURE]}
    config |= build_eagle3_layer_fields(head, served)
    config |= build_eagle3_own_fields(head, served)
    config["eagle_config"] = {
        AUX_LAYERS_FIELD: to_sglang_ids(head.aux_layers),
        "use_aux_hidden_state": True,
    }
    return config, rename_tensors(head.state_dict(), TO_SGLANG)
