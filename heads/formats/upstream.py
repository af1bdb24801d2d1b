"""The folder that `export` writes, as the other project reads it: the reader of an export's proof.

It shares nothing with treespec's own readers, so what the writer believes wrongly about a project shows as other
logits. A `Rule` is what a project's own code does; treespec's head then computes what that project would:

    config.json, tensors ──▶ fields, their defaults where absent ──▶ tensors by the head's names
                             ──▶ what the project takes of the target instead ──▶ logits
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, quants
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from treespec.heads.checkpoint import check_shapes
from treespec.heads.folder import GGUF
from treespec.heads.head import EMBEDDING, Config, Head, Tensors
from treespec.heads.layers import SLIDING
from treespec.heads.registry import HEADS

OUTPUT = "lm_head.weight"
NO_DEFAULT = object()  # a field that a project demands, or on whose default its readers differ
PATHS = (  # names of the first layer, and of a norm of later ones: the head's
    (r"^layers\.0\.", "midlayer."),
    (r"^(layers\.\d+\.)hidden_norm\.", r"\1input_layernorm."),
)
LLAMA_CPP = (  # llama.cpp's names of tensors: the head's, below the start of its layer
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


@dataclass(frozen=True)
class Ends:
    """The target's embedding and output embedding, [V, H] each: what a head may take of its target."""

    embedding: Tensor
    output: Tensor

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        logits: Tensor = output(hidden) if output else hidden @ self.output.T
        return logits

    def output_rows(self, tokens: Tensor) -> nn.Linear:
        rows = self.output[tokens]
        layer = nn.Linear(rows.shape[1], len(rows), bias=False)
        layer.weight = nn.Parameter(rows)
        return layer


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one project reads one kind of head.

    source: the project's files that say so.
    layer: where the fields of a Llama stand; "" is the top.
    family: the class of transformers that gives them defaults.
    rotary: the field that tells the rotary positions.
    aux: the field of the aux layers; "" is a project that takes the published ones in any case.
    entered: whether it names the layers that the features enter, not those that they leave.
    fields: of treespec's config, each with its place in the project's and the value where that is absent. "a|b" are
    flags of which one is enough; "" is no place, and the value always holds.
    names: (pattern, replacement) from the file's names of tensors to the head's. unused: tensors that it skips.
    biases: a flag without which it skips biases; "" is none.
    embedding: "target", always the target's; "file", the target's where the file has none; "demanded", the file's.
    output: "own"; "target"; "own if smaller", the target's in place of one of all tokens.
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


def eagle3_fields(drafted: Any, **places: tuple[str, Any]) -> dict[str, tuple[str, Any]]:
    """Of EAGLE-3. drafted: `draft_vocab_size` where it is absent. places: of the parts that a project knows."""
    parts = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    own = {"draft_vocab_size": ("draft_vocab_size", drafted)}
    own["target_hidden_size"] = ("target_hidden_size", None)
    return own | dict.fromkeys(parts, ("", False)) | places


def same_places(*names: str) -> dict[str, tuple[str, Any]]:
    """Flags at the top, false where they are absent."""
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
    fields=eagle3_fields(
        32000,
        norm_before_residual=("norm_before_residual", NO_DEFAULT),
        **same_places("norm_before_fc", "fc_norm", "norm_output"),
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
        fields=eagle3_fields(NO_DEFAULT, **same_places("fc_norm", "norm_output")),
        names=PATHS,
        embedding="target",
    ),
    ("tensorrt-llm", "eagle3"): Rule(
        source="TensorRT-LLM: _torch/models/modeling_speculative.py",
        aux=NESTED_IDS,
        entered=False,
        fields=eagle3_fields(
            None,
            norm_before_fc=("eagle_config.norm_before_fc", False),
            **same_places("fc_norm", "norm_output"),
        ),
        names=PATHS,
        embedding="target",
    ),
    ("vllm", "eagle3"): Rule(
        source="vLLM: models/llama_eagle3.py",
        aux=TOP_IDS,
        fields=eagle3_fields(
            None,
            **same_places("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        ),
        names=PATHS,
    ),
    ("eagle", "eagle3"): Rule(
        source="SafeAILab/EAGLE: model/cnets.py, ea_model.py",
        fields=eagle3_fields(NO_DEFAULT),
        names=PATHS,
    ),
    ("mlx", "eagle3"): Rule(
        source="mlx-vlm 0.7.10: speculative/drafters/eagle3/config.py",
        layer=LAYER,
        rotary="rope_theta",
        aux=TOP_IDS,
        fields=eagle3_fields(32000, **same_places("norm_before_residual", "norm_before_fc")),
        names=PATHS,
        embedding="demanded",
    ),
    ("gguf", "eagle3"): Rule(
        source="llama.cpp: src/models/eagle3.cpp",
        rotary="rope_theta",
        aux="target_layers",
        fields=eagle3_fields(None, **same_places("norm_before_residual", "norm_before_fc")),
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


def read_as(to: str, kind: str, folder: Path, ends: Ends, depth: int) -> Head:
    """The head that a project computes with from a folder, in float32, beside a target of `depth` layers.

    Raises ValueError for a field or tensor that the project demands and does not find, and for one that it has no
    place for.
    """
    rule = RULES[to, kind]
    if to == "gguf":
        stored, tensors = read_header(folder / GGUF, kind)
    else:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    config = config_by(rule, kind, stored, depth)
    head: Head = HEADS[kind].build()(config)
    patterns = [(old, new.format(**config) if "{" in new else new) for old, new in rule.names]
    if rule.biases and not stored.get(rule.biases):
        tensors |= {name: 0 * tensors[name] for name in tensors if name.endswith(".bias")}
    fill(head, rule, {rename(name, patterns): value for name, value in tensors.items()}, ends)
    if factors := stored.get("rope_factors"):
        head.rotary.inv_freq = head.rotary.inv_freq / torch.tensor(factors)  # type: ignore[operator, union-attr]
    return head.float().eval()


def config_by(rule: Rule, kind: str, stored: Config, depth: int) -> Config:
    """treespec's config of a head whose stored config a project reads by a rule. depth: of the target."""
    # 1. The project's own fields.
    config: Config = {}
    for name, (places, absent) in rule.fields.items():
        found = [
            value for place in places.split("|") if (value := value_at(stored, place)) is not None
        ]
        if not found and absent is NO_DEFAULT:
            raise ValueError(f"{places} is missing, which {rule.source} demands")
        config[name] = next((value for value in found if value), found[0]) if found else absent
    if kind == "medusa":
        return config

    # 2. The fields of the layers, by the class of transformers that the project reads them with.
    raw = dict(value_at(stored, rule.layer) if rule.layer else stored)
    qwen = raw.get("model_type", rule.family.model_type) == "qwen3"
    family = Qwen3Config if qwen else LlamaConfig
    if rule.rotary != "rope_parameters":
        raw.pop("rope_parameters", None)
    if rule.rotary == "rope_theta":
        raw.pop("rope_scaling", None)
    layer = family(**{name: raw[name] for name in raw if name not in ("model_type", *config)})
    part = raw.get("partial_rotary_factor", 1.0)
    rope = dict(layer.rope_parameters or {}) | (
        {"partial_rotary_factor": part} if part != 1 else {}
    )
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "num_hidden_layers")
    config |= {name: getattr(layer, name) for name in names} | {"rope_parameters": rope}
    if raw.get("layer_types"):
        config |= {name: raw.get(name) for name in ("layer_types", "sliding_window")}

    # 3. What follows from other fields.
    ids = value_at(stored, rule.aux) if rule.aux else [2, depth // 2, depth - 3]
    if kind != "eagle":
        if ids is None:
            raise ValueError(f"{rule.aux} is missing, which {rule.source} demands")
        ids = [int(k) if rule.entered else int(k) + 1 for k in ids]
        config["aux_hidden_state_layer_ids" if kind == "dflash" else TOP_IDS] = ids
    if kind == "dflash":
        config |= {"own_output": True, "causal": causal_layers(rule, stored, config)}
    else:
        config["qk_norm"] = qwen
    return config


def causal_layers(rule: Rule, stored: Config, config: Config) -> list[bool]:
    """For each layer of DFlash whether a block row sees no later one.

    In speculators those with a window do not, unless a flag says otherwise; in llama.cpp a flag is for all layers.
    """
    types = config.get("layer_types") or [""] * config["num_hidden_layers"]
    if not rule.layer:
        return [bool(stored["attention.causal"])] * len(types)
    return [kind == SLIDING and not stored.get("sliding_window_non_causal") for kind in types]


def fill(head: Head, rule: Rule, tensors: Tensors, ends: Ends) -> None:
    """Give a head the tensors that a project reads, and the target's where it takes these."""
    # 1. The tensors that it reads. Its draft vocabulary follows from d2t.
    tensors = {
        name: value for name, value in tensors.items() if not re.fullmatch(rule.unused, name)
    }
    d2t = tensors.pop("d2t", None)
    if rule.embedding == "target":
        tensors.pop(EMBEDDING, None)
    elif rule.embedding == "demanded" and EMBEDDING not in tensors:
        raise ValueError(f"{EMBEDDING} is missing, which {rule.source} demands")
    if rule.output == "own if smaller" and len(tensors[OUTPUT]) == head.vocab_size:
        tensors[OUTPUT] = ends.output

    # 2. The head.
    if EMBEDDING not in tensors:
        head.embed_tokens = None
        head.share_embedding(nn.Parameter(ends.embedding, requires_grad=False))
    check_shapes(head, tensors, (EMBEDDING, "d2t", "t2d"))
    head.load_state_dict(tensors, strict=False)
    if (d2t is None) != (head.d2t is None):
        raise ValueError(f"d2t does not fit draft_vocab_size, as {rule.source} reads them")
    if d2t is not None:
        tokens = d2t + torch.arange(len(d2t))
        if tokens.min() < 0 or tokens.max() >= head.vocab_size:
            raise ValueError("d2t leads to tokens that the target does not have")
        head.draft(tokens)


def value_at(config: Config, place: str) -> Any:
    """The value at a place such as `eagle_config.norm_before_fc`; None where there is none."""
    value: Any = config
    for part in place.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    return value


def rename(name: str, patterns: list[tuple[str, str]]) -> str:
    """The name after each (pattern, replacement) in turn."""
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name


def read_header(file: Path, kind: str) -> tuple[Config, Tensors]:
    """What llama.cpp reads of a GGUF file: its fields by the names of a Llama, and its tensors.

    llama.cpp turns neighbours in EAGLE-3's queries and keys, treespec halves: row 2 i of a head is row i.
    """
    # 1. The fields.
    reader = GGUFReader(file)
    keys = {key.removeprefix(f"{kind}."): value.contents() for key, value in reader.fields.items()}
    fields = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "sliding_window": "attention.sliding_window",
        "mask_token_id": "tokenizer.ggml.mask_token_id",
    }
    config = keys | {name: keys[key] for name, key in fields.items() if key in keys}
    if pattern := keys.get("attention.sliding_window_pattern"):
        config["layer_types"] = [SLIDING if slides else "full_attention" for slides in pattern]

    # 2. The tensors.
    tensors: Tensors = {}
    for stored in reader.tensors:
        if stored.name == "d2t":
            ids = torch.from_numpy(stored.data.astype(np.int64))
            tensors["d2t"] = ids - torch.arange(len(ids))
            config["draft_vocab_size"] = len(ids)
            continue
        value = torch.from_numpy(quants.dequantize(stored.data, stored.tensor_type).copy())
        if stored.name == "rope_freqs.weight":
            config["rope_factors"] = value.tolist()
            continue
        if kind == "eagle3" and re.search(r"attn_[qk]\.", stored.name):
            size = config["head_dim"]
            order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
            value = value.view(-1, size, value.shape[1])[:, order].flatten(0, 1)
        tensors[stored.name] = value
    return config, tensors
