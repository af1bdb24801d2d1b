"""TensorRT-LLM's format of EAGLE-3 heads: SGLang's layer ids and names, and `norm_before_fc` in `eagle_config`."""

from transformers import PretrainedConfig

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle3_fields import (
    AUX_LAYERS_FIELD,
    EAGLE3_ARCHITECTURE,
    TO_FIRST,
    build_eagle3_layer_fields,
    build_eagle3_own_fields,
    check_parts,
)
from treespec.heads.formats.llama_fields import check_layer, check_own_output, rename_tensors
from treespec.heads.formats.sglang import TO_SGLANG, to_sglang_ids
from treespec.heads.head import Config, Stored


def write_tensorrt_eagle3(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-3 head. TensorRT-LLM calls the first layer layers.0."""
    check_own_output(head)
    check_layer(head)
    check_parts(head, "tensorrt-llm")
    head_fields = build_eagle3_own_fields(head, served)
    config: Config = {"architectures": [EAGLE3_ARCHITECTURE]}
    config |= build_eagle3_layer_fields(head, served)
    config |= head_fields
    config["eagle_config"] = {
        AUX_LAYERS_FIELD: to_sglang_ids(head.aux_layers),
        "use_aux_hidden_state": True,
        "norm_before_fc": head_fields["norm_before_fc"],
    }
    return config, rename_tensors(head.state_dict(), TO_SGLANG, TO_FIRST)
