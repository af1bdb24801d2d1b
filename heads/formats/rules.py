"""How other projects read the heads that `export` writes: a rule for each project and kind, taken from its code.

`treespec.heads.formats.upstream` reads a folder by a rule.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from treespec.heads.layers import SLIDING_ATTENTION

# Marks a field that a project requires, or whose default differs between its readers.
NO_DEFAULT = object()
PATHS = (  # (the file's name, treespec's) of the first layer, and of a norm of later layers
    (r"^layers\.0\.", "midlayer."),
    (r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm."),
)
LLAMA_CPP = (  # (llama.cpp's name, treespec's) of tensors; in a layer after the layer's prefix
    (r"attn_norm_2\.", "hidden_norm."),
    (r"attn_norm\.", "input_layernorm."),
    (r"attn_(q|k)_norm\.", r"self_attn.\1_norm."),
    (r"attn_(q|k|v)\.", r"self_attn.\1_proj."),
    (r"attn_output\.", "self_attn.o_proj."),
    (r"ffn_norm\.", "post_attention_layernorm."),
    (r"ffn_(gate|up|down)\.", r"mlp.\1_proj."),
    (r"^token_embd\.", "embed_tokens."),
    (r"^output_norm\.", "norm."),
    (r"^output\.", "lm_head."),
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one project reads one kind of head.

    Attributes:
        source: the project's files that the rule follows.
        layer: path of the object with Llama's fields in config.json; "": the top level.
        family: the class of transformers with the defaults of these fields.
        rotary: the field of the rotary positions.
        aux: the path of the aux layers; "": the project always takes the published ones.
        entered: whether the ids name the layers that the features enter (else the layers that they leave).
        fields: for each field of treespec's config its path in the project's, and the value if that is
            absent. A path "a|b" names two flags; either is enough. With the path "" the value always holds.
        names: (pattern, replacement) from the file's names of tensors to treespec's.
        unused: pattern of the tensors that the project skips.
        biases: the flag without which the project skips biases; "": it never skips them.
        embedding: "target": always the target's; "file": the file's, or the target's if the file has none;
            "demanded": the file's, and without one the project fails.
        output: "own": the file's; "target": the target's; "own if smaller": the file's, or the target's if the
            file's has rows for all tokens.
    """

    source: str
    layer: str = ""
    family: type[PretrainedConfig] = LlamaConfig
    rotary: str = "rope_scaling"
    aux: str = ""
    entered: bool = True
    fields: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()
    unused: str = r"t2d|verifier_.*"
    biases: str = ""
    embedding: str = "file"
    output: str = "own"


def list_eagle3_fields(drafted: Any, **part_places: tuple[str, Any]) -> dict[str, tuple[str, Any]]:
    """Build `Rule.fields` of an EAGLE-3 head.

    drafted: the value if `draft_vocab_size` is absent. part_places: (path, default) of each norm flag that a
    project knows; the others are false.
    """
    parts = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    fields = {"draft_vocab_size": ("draft_vocab_size", drafted)}
    fields["target_hidden_size"] = ("target_hidden_size", None)
    return fields | dict.fromkeys(parts, ("", False)) | part_places


def has_same_layers(*names: str) -> dict[str, tuple[str, Any]]:
    """Build `Rule.fields` of flags that have treespec's names at the top level, false if they are absent."""
    return {name: (name, False) for name in names}


NESTED_IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
TOP_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = "transformer_layer_config"
SPECULATORS_EAGLE3 = Rule(
    source="speculators 0.9: models/eagle3/config.py, model.py; vLLM: configs/speculators/algos.py",
    layer=LAYER,
    family=Qwen3Config,
    rotary="rope_parameters",
    aux=TOP_IDS,
    # speculators takes false where `norm_before_residual` is absent, vLLM true.
    fields=list_eagle3_fields(
        32000,
        norm_before_residual=("norm_before_residual", NO_DEFAULT),
        **has_same_layers("norm_before_fc", "fc_norm", "norm_output"),
    ),
    names=PATHS,
)
LEVELS = "speculators_config.proposal_methods.0.speculative_tokens"
RULES: dict[tuple[str, str], Rule] = {
    ("sglang", "eagle"): Rule(
        source="SGLang: models/llama_eagle.py, llama.py",
        fields={"bias": ("", True), "qkv_bias": ("attention_bias|bias", False)},
        embedding="target",
        output="target",
    ),
    ("vllm", "eagle"): Rule(
        source="vLLM: models/llama_eagle.py, llama.py",
        fields={"bias": ("", False), "qkv_bias": ("qkv_bias|attention_bias|bias", False)},
        unused=r"fc\.bias",
        embedding="target",
        output="target",
    ),
    ("eagle", "eagle"): Rule(
        source="SafeAILab/EAGLE: model/cnets1.py, ea_model.py",
        fields={"bias": ("bias", True), "qkv_bias": ("qkv_bias", False)},
        output="target",
    ),
    ("sglang", "eagle3"): Rule(
        source="SGLang: models/llama_eagle3.py, speculative/eagle_worker.py",
        aux=NESTED_IDS,
        entered=False,
        fields=list_eagle3_fields(NO_DEFAULT, **has_same_layers("fc_norm", "norm_output")),
        names=PATHS,
        embedding="target",
    ),
    ("tensorrt-llm", "eagle3"): Rule(
        source="TensorRT-LLM: _torch/models/modeling_speculative.py",
        aux=NESTED_IDS,
        entered=False,
        fields=list_eagle3_fields(
            None,
            norm_before_fc=("eagle_config.norm_before_fc", False),
            **has_same_layers("fc_norm", "norm_output"),
        ),
        names=PATHS,
        embedding="target",
    ),
    ("vllm", "eagle3"): Rule(
        source="vLLM: models/llama_eagle3.py",
        aux=TOP_IDS,
        fields=list_eagle3_fields(
            None,
            **has_same_layers("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        ),
        names=PATHS,
    ),
    ("eagle", "eagle3"): Rule(
        source="SafeAILab/EAGLE: model/cnets.py, ea_model.py",
        fields=list_eagle3_fields(NO_DEFAULT),
        names=PATHS,
    ),
    ("mlx", "eagle3"): Rule(
        source="mlx-vlm 0.7.10: speculative/drafters/eagle3/config.py",
        layer=LAYER,
        rotary="rope_theta",
        aux=TOP_IDS,
        fields=list_eagle3_fields(
            32000, **has_same_layers("norm_before_residual", "norm_before_fc")
        ),
        names=PATHS,
        embedding="demanded",
    ),
    ("gguf", "eagle3"): Rule(
        source="llama.cpp: src/models/eagle3.cpp",
        rotary="rope_theta",
        aux="target_layers",
        fields=list_eagle3_fields(
            None, **has_same_layers("norm_before_residual", "norm_before_fc")
        ),
        names=((r"^blk\.0\.", "midlayer."), *LLAMA_CPP, (r"^enc\.output_norm\.", "input_norm.")),
    ),
    ("gguf", "dflash"): Rule(
        source="llama.cpp: src/models/dflash.cpp",
        rotary="rope_theta",
        aux="target_layers",
        fields={
            "target_hidden_size": ("target_hidden_size", None),
            "block_size": ("block_size", NO_DEFAULT),
            "mask_token_id": ("mask_token_id", NO_DEFAULT),
            "draft_vocab_size": ("draft_vocab_size", None),
        },
        names=((r"^blk\.", "layers."), *LLAMA_CPP, (r"^enc\.output_norm\.", "hidden_norm.")),
    ),
    ("speculators", "eagle3"): SPECULATORS_EAGLE3,
    ("speculators", "p-eagle"): Rule(
        source="speculators 0.9: models/peagle/config.py",
        layer=LAYER,
        family=Qwen3Config,
        rotary="rope_parameters",
        aux=TOP_IDS,
        fields={
            **SPECULATORS_EAGLE3.fields,
            "mask_token_id": ("mask_token_id", NO_DEFAULT),
            "levels": (LEVELS, NO_DEFAULT),
        },
        names=PATHS,
    ),
    ("speculators", "dflash"): Rule(
        source="speculators 0.9: models/dflash/config.py, core.py",
        layer=LAYER,
        family=Qwen3Config,
        rotary="rope_parameters",
        aux="aux_hidden_state_layer_ids",
        fields={
            "draft_vocab_size": ("draft_vocab_size", 32000),
            "target_hidden_size": ("target_hidden_size", None),
            "block_size": ("block_size", 8),
            "mask_token_id": ("mask_token_id", NO_DEFAULT),
            "sample_from_anchor": ("sample_from_anchor", False),
        },
        embedding="target",
        output="own if smaller",
    ),
    ("nemo", "eagle4"): Rule(
        source="NeMo AutoModel: documentation of speculative/eagle/export_eagle4, draft_llama",
        rotary="rope_scaling",
        aux=TOP_IDS,
        fields={
            "fc_norm": ("fc_norm", NO_DEFAULT),
            "norm_output": ("norm_output", NO_DEFAULT),
            "sliding_window": ("sliding_window", NO_DEFAULT),
            "layer_types": ("", [SLIDING_ATTENTION]),
            "candidate_head": ("candidate_head", NO_DEFAULT),
        },
        names=PATHS,
        embedding="target",
    ),
    ("vllm", "medusa"): Rule(
        source="vLLM: models/medusa.py, transformers_utils/configs/medusa.py",
        fields={
            "medusa_num_heads": ("medusa_num_heads", 5),
            "medusa_num_layers": ("medusa_num_layers", 1),
            "hidden_size": ("hidden_size", 4096),
            "vocab_size": ("truncated_vocab_size", NO_DEFAULT),
        },
        names=(
            (r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear."),
            (r"^lm_heads\.(\d+)\.", r"\1.{medusa_num_layers}."),
        ),
        biases="medusa_fc_bias",
    ),
}
