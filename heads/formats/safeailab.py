"""SafeAILab/EAGLE's format, in which EAGLE-1 and EAGLE-3 were published."""

from transformers import PretrainedConfig

from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle3_fields import (
    AUX_LAYERS_FIELD,
    build_eagle3_layer_fields,
    build_eagle3_own_fields,
    check_parts,
)
from treespec.heads.formats.llama_fields import build_llama_fields, check_layer, check_own_output
from treespec.heads.head import Config, Stored
from treespec.heads.llama import LlamaHead

SAFEAILAB_ROTARY_TYPES = ("default", "linear", "dynamic")  # types that the project computes


def check_safeailab_layer(head: LlamaHead, has_bias_field: bool) -> None:
    """Raises ValueError for a layer that the project does not compute. has_bias_field: as `check_layer`."""
    check_layer(
        head,
        has_bias_field=has_bias_field,
        any_activation=True,
        rotary_types=SAFEAILAB_ROTARY_TYPES,
    )
    llama = head.llama
    width = (llama.head_dim or 0) * llama.num_attention_heads
    if width != llama.hidden_size:
        raise ValueError(
            f"its attention heads are {width} wide together, not {llama.hidden_size} as there"
        )


def write_safeailab_eagle(head: EagleHead, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-1 head: `bias` means `fc`'s, `qkv_bias` the attention's."""
    check_safeailab_layer(head, has_bias_field=True)
    config: Config = {"architectures": ["LlamaForCausalLM"]}
    config |= build_llama_fields(head, served)
    config["bias"] = head.fc.bias is not None
    config["qkv_bias"] = head.config.get("qkv_bias", False)
    return config, head.state_dict()


def write_safeailab_eagle3(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-3 head.

    The project ignores layer ids: its aux layers are fixed. It reads no target embedding of another width than
    H, so `target_hidden_size` is left out if it equals H. Raises ValueError for other aux layers.
    """
    check_own_output(head)
    check_safeailab_layer(head, has_bias_field=False)
    check_parts(head, "eagle")
    text = served.get_text_config()
    depth = text.num_hidden_layers
    expected = (2, depth // 2, depth - 3)
    if head.aux_layers != expected:
        read = ", ".join(map(str, head.aux_layers))
        raise ValueError(f"it reads layers {read}, and SafeAILab/EAGLE {expected} in any case")
    head_fields = build_eagle3_own_fields(head, served)
    head_fields[AUX_LAYERS_FIELD] = list(head.aux_layers)
    if text.hidden_size == head.hidden_size:
        del head_fields["target_hidden_size"]
    config = {"architectures": ["LlamaForCausalLM"]}
    config |= build_eagle3_layer_fields(head, served)
    return config | head_fields, head.state_dict()
