"""SGLang's format of EAGLE heads, and its numbers of the target's layers.

SGLang names the layer that a feature leaves, treespec the layer that it enters (`formats.eagle` draws
both). SGLang's ids stand in `eagle_config`, and it requires `draft_vocab_size`.
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

    Raises ValueError for aux layer 0, the embedding: no layer outputs it.
    """
    if 0 in aux_layers:
        raise ValueError("it reads the target's embedding, which SGLang cannot: export it to vllm")
    return [k - 1 for k in aux_layers]


def write_sglang_eagle(head: EagleHead, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-1 head.

    SGLang's `fc` always has a bias, so a head without one gets zeros. Its field `bias` means the attention's.
    """
    check_layer(head)
    config = {"architectures": ["LlamaForCausalLMEagle"]} | build_llama_fields(head, served)
    tensors = {"fc.bias": torch.zeros(head.hidden_size, dtype=head.dtype, device="cpu")}
    return config, tensors | head.state_dict()


def write_sglang_eagle3(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-3 head, with the layer ids in `eagle_config`."""
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
