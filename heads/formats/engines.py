"""Heads of EAGLE and DFlash for SGLang, TensorRT-LLM, vLLM, its speculators, mlx-vlm, SafeAILab/EAGLE, llama.cpp."""

import re

import torch
from transformers import PretrainedConfig

from treespec.heads.dflash import DFlashHead
from treespec.heads.eagle import EagleHead
from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.head import Config, Head, Stored, Tensors
from treespec.heads.layers import SLIDING
from treespec.heads.llama import LlamaHead
from treespec.heads.p_eagle import PEagleHead
from treespec.heads.registry import KIND

SIZES = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps"),
)
ROTARY = {  # the types that a project computes, where it does not compute all
    "eagle": ("default", "linear", "dynamic"),
    "mlx": ("default",),
}
IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = "LlamaForCausalLMEagle3"
QWEN3 = "Eagle3Qwen3ForCausalLM"  # vLLM's architecture for layers of Qwen3
TO_FIRST = (r"^midlayer\.", "layers.0.")
TO_SGLANG = (r"^(layers\.\d+\.)input_layernorm\.", r"\1hidden_norm.")
VERSION = "0.9.0"  # of speculators, whose logits tests/test_upstream.py compares
DRAFTED = 3  # tokens a cycle, vLLM's default for such a directory
VLLM = ("vllm", "speculators")
LIKE_VLLM = ("vllm", "gguf")
LIKE_SGLANG = ("sglang", "tensorrt-llm")
ENGINES = (*LIKE_SGLANG, *VLLM)
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# The parts that newer heads have, by their names in config.json, and the formats that have a place
# for each. EAGLE-3.1 is `fc_norm` and `norm_output`.
PARTS = {
    **dict.fromkeys(("qk_norm", "sliding_window"), VLLM),
    "norm_before_residual": (*VLLM, "gguf", "mlx"),
    "norm_before_fc": ("tensorrt-llm", *VLLM, "gguf", "mlx"),
    **dict.fromkeys(("fc_norm", "norm_output"), ENGINES),
    "num_hidden_layers": (*ENGINES, "mlx"),
}


def write_eagle(head: EagleHead, served: PretrainedConfig, to: str) -> Stored:
    """For SafeAILab/EAGLE, vLLM or SGLang.

    The `fc` of vLLM has no bias, that of SGLang always one; in both the field `bias` would give the
    attention one.
    """
    if head.lm_head is not None:
        raise ValueError("it has an output layer of its own, for which the format has no place")
    check_layer(head, to, biases=to != "sglang")
    config = llama_fields(head, served)
    tensors = head.state_dict()
    if to == "sglang":
        zeros = {"fc.bias": torch.zeros(head.hidden_size, dtype=head.dtype)}
        return {"architectures": ["LlamaForCausalLMEagle"]} | config, zeros | tensors
    biased = to == "eagle" and head.fc.bias is not None
    if not biased and (bias := tensors.pop("fc.bias", None)) is not None and bias.any():
        raise ValueError(
            "fc.bias is not zero, vLLM's EAGLE-1 has none: train with --no-bias, or export to "
            "sglang"
        )
    own = {"bias": biased, "qkv_bias": head.config.get("qkv_bias", False)}
    return {"architectures": ["LlamaForCausalLM"]} | config | own, tensors


def write_eagle3(head: Eagle3Head, served: PretrainedConfig, to: str) -> Stored:
    """For an engine, or SafeAILab/EAGLE.

    SafeAILab/EAGLE reads no layer ids, and no embedding of another width. SGLang requires
    `draft_vocab_size`, and names a norm of later layers otherwise, as does TensorRT-LLM, which reads a
    field of its own. vLLM refuses unknown tensors, and d2t of a head that drafts all tokens; it loads
    a directory of speculators together with the target that it names. mlx-vlm reads such a one.
    """
    # 1. What all have.
    check_own_output(head)
    config = head.config
    tensors = head.state_dict()
    text = served.get_text_config()
    check_layer(head, to)
    parts = parts_of(head)
    for name in sorted(parts):
        if to not in (formats := PARTS[name]):
            known = f"{', '.join(formats[:-1])} and {formats[-1]}"
            raise ValueError(f"its config.json has {name}, which only {known} know")
    qwen = "qk_norm" in parts
    ids = head.aux_layers
    layers = llama_fields(head, served) | {
        "model_type": "qwen3" if qwen else "llama",
        "num_hidden_layers": head.cached_layers,
    }
    if "sliding_window" in parts:
        layers |= {name: config[name] for name in ("layer_types", "sliding_window")}
        layers["use_sliding_window"] = True
    own: Config = {
        "draft_vocab_size": head.output_layers[0].out_features,
        "target_hidden_size": text.hidden_size,
        **{name: name in parts for name in NORMS},
    }

    # 2. SGLang, TensorRT-LLM and SafeAILab/EAGLE.
    if to in LIKE_SGLANG:
        nested = {IDS: to_sglang_ids(ids), "use_aux_hidden_state": True}
        tensors = renamed(tensors, TO_SGLANG)
        if to == "tensorrt-llm":
            nested["norm_before_fc"] = own["norm_before_fc"]
            tensors = renamed(tensors, TO_FIRST)
        return {"architectures": [LLAMA]} | layers | own | {"eagle_config": nested}, tensors
    own[IDS] = list(ids)
    if to == "eagle":
        depth = text.num_hidden_layers
        if ids != (expected := (2, depth // 2, depth - 3)):
            raise ValueError(
                f"it reads layers {', '.join(map(str, ids))}, and SafeAILab/EAGLE {expected} in any "
                "case"
            )
        if text.hidden_size == head.hidden_size:
            del own["target_hidden_size"]
        return {"architectures": ["LlamaForCausalLM"]} | layers | own, tensors

    # 3. vLLM, llama.cpp, speculators and mlx-vlm.
    if to in LIKE_VLLM:
        return {"architectures": [QWEN3 if qwen else LLAMA]} | layers | own, tensors
    nested = nesting("eagle3", "Eagle3Speculator", layers, served, DRAFTED)
    return own | nested, renamed(tensors, TO_FIRST)


def check_own_output(head: Head) -> None:
    """Raises ValueError for an EAGLE-3 head that has the target's output layer: the formats store one."""
    if head.lm_head is None:
        raise ValueError("it has the target's output layer, and the formats store one of its own")


def write_p_eagle(head: PEagleHead, served: PretrainedConfig, to: str) -> Stored:
    """As EAGLE-3's, for speculators."""
    config, tensors = write_eagle3(head, served, to)
    layers = config["transformer_layer_config"]
    nested = nesting("peagle", "PEagleSpeculator", layers, served, head.max_depth)
    return config | nested | {"mask_token_id": head.mask_token}, tensors


def write_dflash(head: DFlashHead, served: PretrainedConfig, to: str) -> Stored:
    """For speculators, or for llama.cpp.

    llama.cpp drafts nothing from the last token's own row. There all layers are causal, or none is.
    Raises ValueError for a head that uses the target's output layer, as z-lab's do.
    """
    if head.lm_head is None:
        raise ValueError("it has no output layer of its own: its directory is z-lab's already")
    check_layer(head, to)
    layers = llama_fields(head, served) | {
        "model_type": "qwen3",
        "num_hidden_layers": head.cached_layers,
    }
    if to == "gguf":
        if head.from_anchor or len(set(head.causal)) > 1:
            part = "sample_from_anchor" if head.from_anchor else "layers of which some are causal"
            raise ValueError(f"it has {part}, for which llama.cpp has no place")
        layers |= {"model_type": head.kind, "causal": list(head.causal)}
        return head.config | layers, head.state_dict()
    if head.config.get("layer_types"):
        layers |= {name: head.config[name] for name in ("layer_types", "sliding_window")}
    own = {
        "draft_vocab_size": head.lm_head.out_features,
        "target_hidden_size": served.get_text_config().hidden_size,
        "aux_hidden_state_layer_ids": list(head.aux_layers),
        "block_size": head.block,
        "mask_token_id": head.mask_token,
        "sample_from_anchor": bool(head.from_anchor),
        "sliding_window_non_causal": not any(head.causal),
    }
    return own | nesting(
        "dflash", "DFlashSpeculator", layers, served, head.max_depth
    ), head.state_dict()


def nesting(
    kind: str, architecture: str, layers: Config, served: PretrainedConfig, drafted: int
) -> Config:
    """What speculators' config.json nests: the layers, and how `vllm serve` shall draft."""
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    family = "Qwen3ForCausalLM" if layers["model_type"] == "qwen3" else "LlamaForCausalLM"
    target = {"name_or_path": served.name_or_path, "architectures": served.architectures or []}
    return {
        KIND: kind,
        "speculators_version": VERSION,
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


def parts_of(head: Eagle3Head) -> set[str]:
    """The names in PARTS of what a head has."""
    has = head.config | {
        "num_hidden_layers": head.cached_layers > 1,
        "sliding_window": SLIDING in (head.config.get("layer_types") or ()),
    }
    return {name for name in PARTS if has.get(name)}


def check_layer(head: LlamaHead, to: str, biases: bool = False) -> None:
    """Raises ValueError for a decoder layer that a format cannot describe, or does not compute.

    biases: whether the format has a field for biases of queries, keys and values. The engines have
    one activation; SafeAILab/EAGLE has a field for it, and computes some rotary positions.
    """
    llama = head.llama
    scale = head.config.get("embed_scale", 1.0)
    rope = llama.rope_parameters or {}
    eagle = to == "eagle"
    kind = rope.get("rope_type")
    part = rope.get("partial_rotary_factor", 1.0)
    rotary = ROTARY.get(to, ())
    width = (llama.head_dim or 0) * llama.num_attention_heads
    problems = {
        f"its target's embeddings are scaled by {scale:g}, for which there is no field": scale != 1,
        "its queries, keys and values have biases, for which there is no field": not biases
        and head.config.get("qkv_bias"),
        f"its activation is {llama.hidden_act}, where the engines have silu": not eagle
        and llama.hidden_act != "silu",
        f"its rotary positions are of type {kind!r}, which is none of {', '.join(rotary)}": rotary
        and kind not in rotary,
        f"its partial_rotary_factor is {part}, which the project does not compute": to in ROTARY
        and part != 1.0,
        f"its attention heads are {width} wide together, not {llama.hidden_size} as there": eagle
        and width != llama.hidden_size,
    }
    problem = next((words for words, wrong in problems.items() if wrong), None)
    if problem:
        raise ValueError(problem)


def llama_fields(head: LlamaHead, served: PretrainedConfig) -> Config:
    """The fields of a Llama of one layer. `write_eagle3` overrides what its layers have otherwise.

    They hold the rotary positions three times, because versions of the engines read different
    fields. The context is at least the target's: the engines stop at the end of the shorter one.
    """
    llama = head.llama
    rope: Config = dict(llama.rope_parameters or {})
    kind = rope["rope_type"]
    theta = rope["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"} | {"type": kind}
    context = getattr(served.get_text_config(), "max_position_embeddings", None) or 0
    return {
        "model_type": "llama",
        "num_hidden_layers": 1,
        **{name: getattr(llama, name) for name in SIZES},
        "max_position_embeddings": max(llama.max_position_embeddings, context),
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else scaling,
        "rope_parameters": rope,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings"), False),
        "torch_dtype": dtype_of(head),
    }


def renamed(tensors: Tensors, *patterns: tuple[str, str]) -> Tensors:
    """The tensors under the names that (pattern, replacement) after the other give.

    Raises ValueError where two get one name.
    """
    found: Tensors = {}
    for name, value in tensors.items():
        for pattern, replacement in patterns:
            name = re.sub(pattern, replacement, name)
        if name in found:
            raise ValueError(f"two tensors stand for {name}")
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
