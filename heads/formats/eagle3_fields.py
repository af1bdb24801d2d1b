"""The fields of an EAGLE-3 head with the same names in all engines, and the parts that only some engines have."""

from transformers import PretrainedConfig

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.formats.llama_fields import build_llama_fields
from treespec.heads.head import Config
from treespec.heads.layers import SLIDING_ATTENTION

AUX_LAYERS_FIELD = "eagle_aux_hidden_state_layer_ids"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
EAGLE3_QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"  # vLLM's architecture for layers of Qwen3
TO_FIRST = (r"^midlayer\.", "layers.0.")
EXPORTED_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Parts of newer heads by their names in config.json -> the formats that can describe them. EAGLE-3.1 is
# `fc_norm` and `norm_output`.
PARTS_BY_ENGINE = {
    "qk_norm": ("vllm", "speculators"),
    "sliding_window": ("vllm", "speculators"),
    "norm_before_residual": ("vllm", "speculators", "gguf", "mlx"),
    "norm_before_fc": ("tensorrt-llm", "vllm", "speculators", "gguf", "mlx"),
    "fc_norm": ("sglang", "tensorrt-llm", "vllm", "speculators"),
    "norm_output": ("sglang", "tensorrt-llm", "vllm", "speculators"),
    "num_hidden_layers": ("sglang", "tensorrt-llm", "vllm", "speculators", "mlx"),
    "kv_lora_rank": (),
}


def list_head_parts(head: Eagle3Head) -> set[str]:
    """List the parts of a head that EAGLE-3 as published does not have, by their names in `PARTS_BY_ENGINE`."""
    config = head.config
    has_parts = dict(config)
    has_parts["num_hidden_layers"] = head.cached_layers > 1
    has_parts["sliding_window"] = SLIDING_ATTENTION in (config.get("layer_types") or ())
    return {name for name in PARTS_BY_ENGINE if has_parts.get(name)}


def check_parts(head: Eagle3Head, to: str) -> None:
    """Raises ValueError for a part of a head that the format `to` cannot describe."""
    for name in sorted(list_head_parts(head)):
        formats = PARTS_BY_ENGINE[name]
        if not formats:
            raise ValueError(f"its config.json has {name}, which no export writes")
        if to not in formats:
            format_names = f"{', '.join(formats[:-1])} and {formats[-1]}"
            raise ValueError(f"its config.json has {name}, which only {format_names} know")


def build_eagle3_layer_fields(head: Eagle3Head, served: PretrainedConfig) -> Config:
    """Build the fields of the decoder layers: Llama's or Qwen3's, their number, and their windows."""
    parts = list_head_parts(head)
    fields = build_llama_fields(head, served)
    fields["num_hidden_layers"] = head.cached_layers
    if "qk_norm" in parts:
        fields["model_type"] = "qwen3"
    if "sliding_window" in parts:
        fields["layer_types"] = head.config["layer_types"]
        fields["sliding_window"] = head.config["sliding_window"]
        fields["use_sliding_window"] = True
    return fields


def build_eagle3_own_fields(head: Eagle3Head, served: PretrainedConfig) -> Config:
    """Build the fields outside the layers: draft vocabulary, the target's width, and flags of norms."""
    parts = list_head_parts(head)
    fields: Config = {
        "draft_vocab_size": head.output_layers[0].out_features,
        "target_hidden_size": served.get_text_config().hidden_size,
    }
    for name in EXPORTED_NORM_FLAGS:
        fields[name] = name in parts
    return fields
