"""The format of speculators: config.json nests the layers in one object, and how `vllm serve` drafts in another.

`vllm serve` loads such a directory together with the target that it names.
"""

from typing import Any

from transformers import PretrainedConfig

from treespec.heads.dflash import DFlashHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.eagle3_fields import (
    AUX_LAYERS_FIELD,
    EAGLE3_ARCHITECTURE,
    EAGLE3_QWEN3_ARCHITECTURE,
    TO_FIRST,
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
from treespec.heads.p_eagle import PEagleHead
from treespec.heads.registry import SPECULATORS_KIND_FIELD

SPECULATORS_VERSION = "0.9.0"  # tests/test_upstream.py compares logits with this version
DEFAULT_DRAFT_TOKENS = 3  # tokens a cycle, vLLM's default for such a directory
SPECULATORS_WRAPPER_FIELDS = (
    "transformer_layer_config",
    "speculators_config",
    "speculators_version",
    SPECULATORS_KIND_FIELD,
)


def flatten_speculators(config: Config, **defaults: Any) -> Config:
    """Move the fields of the nested layers to the top level. A config of another project is only copied.

    defaults: values of fields that speculators leaves out. Raises ValueError for layers of another family.
    """
    if SPECULATORS_KIND_FIELD not in config:
        return dict(config)
    layer = config["transformer_layer_config"]
    family = layer.get("model_type", "qwen3")
    if family not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config is of model_type {family!r}; only 'llama' and 'qwen3' are known"
        )
    flat = defaults | layer
    for name, value in config.items():
        if name not in SPECULATORS_WRAPPER_FIELDS and value is not None:
            flat[name] = value
    flat["architectures"] = [EAGLE3_ARCHITECTURE]
    if family == "qwen3":
        flat["architectures"] = [EAGLE3_QWEN3_ARCHITECTURE]
    flat["model_type"] = family
    return flat


def build_speculators_nesting(
    kind: str, architecture: str, layers: Config, served: PretrainedConfig, drafted: int
) -> Config:
    """Build the nested objects of speculators' config.json: the layers, and how `vllm serve` drafts.

    Args:
        kind: speculators' name of the kind of head.
        architecture: the name of speculators' class.
        layers: the fields of the decoder layers, with `model_type` llama or qwen3.
        served: the target's config.
        drafted: the number of tokens that `vllm serve` drafts in a cycle.
    """
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    family = "LlamaForCausalLM"
    if layers["model_type"] == "qwen3":
        family = "Qwen3ForCausalLM"
    architectures = served.architectures or []
    target = {"name_or_path": served.name_or_path, "architectures": architectures}
    return {
        SPECULATORS_KIND_FIELD: kind,
        "speculators_version": SPECULATORS_VERSION,
        "architectures": [architecture],
        "tie_word_embeddings": False,
        "torch_dtype": layers["torch_dtype"],
        "transformer_layer_config": {"architectures": [family]} | layers,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": target,
        },
    }


def write_speculators_eagle3(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of an EAGLE-3 head, for `vllm serve DIRECTORY`."""
    check_own_output(head)
    check_layer(head)
    check_parts(head, "speculators")
    return build_eagle3_speculator(head, served)


def build_eagle3_speculator(head: Eagle3Head, served: PretrainedConfig) -> Stored:
    """Build config.json and the tensors of an EAGLE-3 head that was checked before. mlx-vlm reads them too."""
    config = build_eagle3_own_fields(head, served)
    config[AUX_LAYERS_FIELD] = list(head.aux_layers)
    layers = build_eagle3_layer_fields(head, served)
    config |= build_speculators_nesting(
        "eagle3", "Eagle3Speculator", layers, served, DEFAULT_DRAFT_TOKENS
    )
    return config, rename_tensors(head.state_dict(), TO_FIRST)


def write_speculators_p_eagle(head: PEagleHead, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of a P-EAGLE head: EAGLE-3's fields, all levels at once, and the mask token."""
    config, tensors = write_speculators_eagle3(head, served)
    layers = config["transformer_layer_config"]
    config |= build_speculators_nesting(
        "peagle", "PEagleSpeculator", layers, served, head.max_depth
    )
    config["mask_token_id"] = head.mask_token
    return config, tensors


def write_speculators_dflash(head: DFlashHead, served: PretrainedConfig) -> Stored:
    """Write config.json and the tensors of a DFlash head with an output layer.

    Raises ValueError for a head that uses the target's output layer, as z-lab's do.
    """
    layers = build_dflash_layer_fields(head, served)
    layers["model_type"] = "qwen3"
    if head.config.get("layer_types"):
        layers["layer_types"] = head.config["layer_types"]
        layers["sliding_window"] = head.config["sliding_window"]
    assert head.lm_head is not None
    head_fields = {
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": served.get_text_config().hidden_size,
        "aux_hidden_state_layer_ids": list(head.aux_layers),
        "block_size": head.block,
        "mask_token_id": head.mask_token,
        "sample_from_anchor": bool(head.from_anchor),
        "sliding_window_non_causal": not any(head.causal),
    }
    nested = build_speculators_nesting("dflash", "DFlashSpeculator", layers, served, head.max_depth)
    return head_fields | nested, head.state_dict()


def build_dflash_layer_fields(head: DFlashHead, served: PretrainedConfig) -> Config:
    """Build the fields of a DFlash head's layers. Raises ValueError for a head that no format can describe."""
    if head.lm_head is None:
        raise ValueError("it has no output layer of its own: its directory is z-lab's already")
    check_layer(head)
    fields = build_llama_fields(head, served)
    fields["num_hidden_layers"] = head.cached_layers
    return fields
