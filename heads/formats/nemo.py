"""NeMo AutoModel's format of EAGLE-4 heads, `LlamaForCausalLMEagle4`; `formats.eagle4` reads it.

Its documentation says (`export_eagle4`, nightly, 29 November 2026) that config.json has only the sizes, norms, rotary
positions, window, aux layers and candidate head, because the engines refuse any other field, and that the target's
embedding stands in the file.
"""

from transformers import PretrainedConfig

from treespec.heads.eagle4 import Eagle4Head
from treespec.heads.formats.eagle3_fields import AUX_LAYERS_FIELD, TO_FIRST, list_head_parts
from treespec.heads.formats.llama_fields import (
    LLAMA_SIZE_FIELDS,
    build_llama_fields,
    check_layer,
    rename_tensors,
)
from treespec.heads.head import Config, Stored

EAGLE4_ARCHITECTURE = "LlamaForCausalLMEagle4"
LLAMA_FIELDS = ("model_type", "num_hidden_layers", "max_position_embeddings", *LLAMA_SIZE_FIELDS)
EAGLE4_PARTS = {"fc_norm", "norm_output", "sliding_window"}


def write_nemo_eagle4(head: Eagle4Head, served: PretrainedConfig, to: str) -> Stored:
    """Write config.json and the tensors of an EAGLE-4 head.

    Raises ValueError for a layer that is not EAGLE-3.1's with a window, and for a head that drafts few tokens.
    """
    # 1. What the format cannot describe.
    check_layer(head)
    parts = list_head_parts(head)
    if parts != EAGLE4_PARTS:
        raise ValueError(
            f"its layer has the parts {sorted(parts)}, and the format's has {sorted(EAGLE4_PARTS)}"
        )
    if head.vocabulary is not None:
        raise ValueError(
            f"it drafts {len(head.vocabulary)} tokens, and the format's heads draft all: train it without --draft-vocab"
        )

    # 2. The fields.
    fields = build_llama_fields(head, served)
    rope: Config = dict(fields["rope_parameters"])
    config: Config = {"architectures": [EAGLE4_ARCHITECTURE]}
    for name in LLAMA_FIELDS:
        config[name] = fields[name]
    config["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    config["fc_norm"] = True
    config["norm_output"] = True
    config["sliding_window"] = head.config["sliding_window"]
    config[AUX_LAYERS_FIELD] = list(head.aux_layers)
    config["candidate_head"] = head.config["candidate_head"]
    return config, rename_tensors(head.state_dict(), TO_FIRST)
