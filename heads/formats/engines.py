"""Heads of EAGLE-1 and EAGLE-3 for SGLang, vLLM, vllm-project/speculators and SafeAILab/EAGLE."""

import re
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from treespec.heads.eagle import EagleHead, FeatureHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.head import Config, Head, Stored, Tensors
from treespec.heads.layers import SLIDING
from treespec.heads.registry import KIND

SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps"),
)
ROTARY = ("default", "linear", "dynamic")  # the types that SafeAILab/EAGLE computes
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = "LlamaForCausalLMEagle3"
QWEN3 = "Eagle3Qwen3ForCausalLM"  # vLLM's architecture for layers of Qwen3
TO_SGLANG = (r"^(layers\.\d+\.)input_layernorm\.", r"\1hidden_norm.")
VERSION = "0.9.0"  # of speculators, whose logits tests/test_upstream.py compares
DRAFTED = 3  # tokens a cycle, vLLM's default for such a directory
VLLM = ("vllm", "speculators")
ENGINES = ("sglang", *VLLM)
NORMS = ("norm_before_fc", "fc_norm", "norm_output")
# The parts that newer heads have, by their names in config.json: in words, and the formats that
# have a place for each. EAGLE-3.1 is `fc_norm` and `norm_output`.
PARTS = {
    "norm_before_residual": ("its residual is normed", VLLM),
    "norm_before_fc": ("a norm takes all its aux hidden states together", VLLM),
    "fc_norm": ("each of its aux hidden states has a norm", ENGINES),
    "norm_output": ("its next feature is the normed state", ENGINES),
    "qk_norm": ("its layers are Qwen3's", VLLM),
    "num_hidden_layers": ("it has several layers", ENGINES),
    "sliding_window": ("its layers look back over a window alone", VLLM),
}


@dataclass(frozen=True)
class Served:
    """The target next to which an engine runs the head.

    name: the directory or hub id from which the engine loads it.
    """

    name: str
    architectures: tuple[str, ...]
    layers: int
    hidden_size: int
    vocab_size: int
    context_length: int

    @classmethod
    def of(cls, name: str, config: PretrainedConfig) -> "Served":
        """From the target's config, or its text model's."""
        text = config.get_text_config()
        length = getattr(text, "max_position_embeddings", None) or 0
        sizes = text.num_hidden_layers, text.hidden_size, text.vocab_size, length
        return cls(name, tuple(config.architectures or ()), *sizes)


def write_eagle(head: EagleHead, served: Served, to: str) -> Stored:
    """For SafeAILab/EAGLE, vLLM or SGLang.

    The `fc` of vLLM has no bias, that of SGLang always one; in both the field `bias` would give the
    attention one.
    """
    # 1. What all have.
    check_layer(head, to, biases=to != "sglang")
    architecture = "LlamaForCausalLMEagle" if to == "sglang" else "LlamaForCausalLM"
    config = {"architectures": [architecture]} | llama_fields(head, served)
    tensors = head.state_dict()
    if to == "sglang":
        zeros = torch.zeros(head.hidden_size, dtype=head.dtype)
        return config, {"fc.bias": zeros} | tensors

    # 2. The biases.
    biased = to == "eagle" and head.fc.bias is not None
    if not biased and (bias := tensors.pop("fc.bias", None)) is not None and bias.any():
        raise ValueError(
            "fc.bias is not zero, vLLM's EAGLE-1 has none: train with --no-bias, or export to "
            "sglang"
        )
    return config | {"bias": biased, "qkv_bias": head.config.get("qkv_bias", False)}, tensors


def write_eagle3(head: Eagle3Head, served: Served, to: str) -> Stored:
    """For an engine, SafeAILab/EAGLE, or treespec itself: a head in treespec's own terms.

    SafeAILab/EAGLE reads no layer ids, and no embedding of another width. SGLang requires
    `draft_vocab_size`, and names a norm of later layers otherwise. vLLM refuses unknown tensors,
    and d2t of a head that drafts all tokens; it loads a directory of speculators together with the
    target that it names.
    """
    # 1. What all have.
    config, tensors = head.config, head.state_dict()
    if to == "treespec":
        return config, tensors
    check_layer(head, to)
    parts = parts_of(head)
    for name in sorted(parts):
        words, formats = PARTS[name]
        if to not in formats:
            known = f"{', '.join(formats[:-1])} and {formats[-1]}"
            raise ValueError(f"{words} ({name}), which only {known} know")
    own: Config = {
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": served.hidden_size,
    }
    qwen, norms = "qk_norm" in parts, {name: name in parts for name in NORMS}
    layers = llama_fields(head, served) | {
        "model_type": "qwen3" if qwen else "llama",
        "num_hidden_layers": len(head.attentions),
    }
    if "sliding_window" in parts:
        windows = {name: config[name] for name in ("layer_types", "sliding_window")}
        layers |= windows | {"use_sliding_window": True}

    # 2. What SGLang and SafeAILab/EAGLE have of their own.
    if to == "sglang":
        left = {IDS: to_sglang_ids(head.aux_layers), "use_aux_hidden_state": True}
        del norms["norm_before_fc"]
        config = {"architectures": [LLAMA]} | layers | own | {"eagle_config": left} | norms
        return config, renamed(tensors, TO_SGLANG)
    own[IDS] = list(head.aux_layers)
    if to == "eagle":
        depth = served.layers
        if head.aux_layers != (expected := (2, depth // 2, depth - 3)):
            raise ValueError(
                f"it reads layers {', '.join(map(str, head.aux_layers))}, and SafeAILab/EAGLE "
                f"{expected} in any case"
            )
        if served.hidden_size == head.hidden_size:
            del own["target_hidden_size"]
        return {"architectures": ["LlamaForCausalLM"]} | layers | own, tensors

    # 3. vLLM. speculators nests the layer, and says how `vllm serve` shall draft.
    own |= norms | {"norm_before_residual": "norm_before_residual" in parts}
    if to == "vllm":
        return {"architectures": [QWEN3 if qwen else LLAMA]} | layers | own, tensors
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": DRAFTED,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    family = "Qwen3ForCausalLM" if qwen else "LlamaForCausalLM"
    config = own | {
        KIND: "eagle3",
        "speculators_version": VERSION,
        "architectures": ["Eagle3Speculator"],
        "tie_word_embeddings": False,
        "torch_dtype": dtype_of(head),
        "transformer_layer_config": {"architectures": [family]} | layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [greedy],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": served.name, "architectures": list(served.architectures)},
        },
    }
    return config, renamed(tensors, (r"^midlayer\.", "layers.0."))


def parts_of(head: Eagle3Head) -> set[str]:
    """The names in PARTS of what a head has."""
    has = head.config | {
        "num_hidden_layers": len(head.attentions) > 1,
        "sliding_window": SLIDING in (head.config.get("layer_types") or ()),
    }
    return {name for name in PARTS if has.get(name)}


def check_layer(head: FeatureHead, to: str, biases: bool = False) -> None:
    """Raises ValueError for a decoder layer that a format cannot describe, or does not compute.

    biases: whether the format has a field for biases of queries, keys and values. The engines have
    one activation; SafeAILab/EAGLE has a field for it, and computes some rotary positions.
    """
    llama, scale = head.llama, head.embed_scale
    rope, eagle = llama.rope_parameters or {}, to == "eagle"
    kind, part = rope.get("rope_type"), rope.get("partial_rotary_factor", 1.0)
    width = (llama.head_dim or 0) * llama.num_attention_heads
    for wrong, words in (
        (
            scale != 1,
            f"its target's embeddings are scaled by {scale:g}, for which there is no field",
        ),
        (
            head.config.get("qkv_bias") and not biases,
            "its queries, keys and values have biases, for which there is no field",
        ),
        (
            not eagle and llama.hidden_act != "silu",
            f"its activation is {llama.hidden_act}, where the engines have silu",
        ),
        (
            eagle and kind not in ROTARY,
            f"its rotary positions are of type {kind!r}, which is none of {', '.join(ROTARY)}",
        ),
        (
            eagle and part != 1.0,
            f"its partial_rotary_factor is {part}, which the project does not compute",
        ),
        (
            eagle and width != llama.hidden_size,
            f"its attention heads are {width} wide together, not {llama.hidden_size} as there",
        ),
    ):
        if wrong:
            raise ValueError(words)


def llama_fields(head: FeatureHead, served: Served) -> Config:
    """The fields of a Llama of one layer. `write_eagle3` overrides what its layers have otherwise.

    They hold the rotary positions three times, because versions of the engines read different
    fields. The context is at least the target's: the engines stop at the end of the shorter one.
    """
    # 1. Rotary positions, under the names that old and new versions read.
    llama = head.llama
    rope: Config = dict(llama.rope_parameters or {})
    kind, theta = rope["rope_type"], rope["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"} | {"type": kind}

    # 2. All fields.
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(llama, name) for name in SIZES},
        "max_position_embeddings": max(llama.max_position_embeddings, served.context_length),
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": rope,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_of(head),
    }


def renamed(tensors: Tensors, *patterns: tuple[str, str]) -> Tensors:
    """The tensors under the names that (pattern, replacement) after the other give."""
    found: Tensors = {}
    for name, value in tensors.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        found[name] = value
    return found


def dtype_of(head: Head) -> str:
    """The dtype of a head's weights, as config.json names it."""
    return str(head.dtype).removeprefix("torch.")


def from_sglang(ids: list[int]) -> list[int]:
    """SGLang's layer ids -> aux layers."""
    return [int(k) + 1 for k in ids]


def to_sglang_ids(aux_layers: tuple[int, ...]) -> list[int]:
    """Aux layers -> SGLang's ids. Raises ValueError for the embedding, which no layer puts out."""
    if 0 in aux_layers:
        raise ValueError("it reads the target's embedding, which SGLang cannot: export it to vllm")
    return [k - 1 for k in aux_layers]
