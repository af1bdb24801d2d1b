"""The folder that `export` writes, as the other project reads it: the reader of an export's proof.

It shares nothing with treespec's own readers, so what the writer believes wrongly about a project shows as other
logits. A `Rule` is what a project's own code does; treespec's head then computes what that project would:

    config.json, tensors ──▶ fields, their defaults where absent ──▶ tensors by the head's names
                             ──▶ what the project takes of the target instead ──▶ logits
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, quants
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from treespec.heads.checkpoint import check_shapes
from treespec.heads.folder import GGUF_FILE
from treespec.heads.formats.rules import NO_DEFAULT, RULES, TOP_IDS, Rule
from treespec.heads.head import EMBEDDING_NAME, Config, Head, Tensors
from treespec.heads.layers import FULL_ATTENTION, SLIDING_ATTENTION
from treespec.heads.registry import HEAD_KINDS

OUTPUT = "lm_head.weight"
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "num_hidden_layers",
)
HEADER_FIELDS = {  # Llama's name of a field: llama.cpp's
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
LAYER_TYPES = {True: SLIDING_ATTENTION, False: FULL_ATTENTION}  # by whether a layer slides


@dataclass(frozen=True)
class Ends:
    """The target's embedding and output embedding, [V, H] each: a head may take either."""

    embedding: Tensor
    output: Tensor

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def compute_output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        if output is None:
            return hidden @ self.output.T
        logits: Tensor = output(hidden)
        return logits

    def copy_output_rows(self, tokens: Tensor) -> nn.Linear:
        rows = self.output[tokens]
        layer = nn.Linear(rows.shape[1], len(rows), bias=False)
        layer.weight = nn.Parameter(rows)
        return layer


def read_as(to: str, kind: str, folder: Path, ends: Ends, depth: int) -> Head:
    """The head that a project computes with from a folder, in float32, beside a target of `depth` layers.

    Raises ValueError for a field or tensor that the project demands and does not find, and for one that it has no
    place for.
    """
    rule = RULES[to, kind]
    if to == "gguf":
        stored, tensors = read_header(folder / GGUF_FILE, kind)
    else:
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    config = read_engine_config(rule, kind, stored, depth)
    head: Head = HEAD_KINDS[kind].build()(config)
    if rule.biases and not stored.get(rule.biases):
        tensors |= {name: 0 * tensors[name] for name in tensors if name.endswith(".bias")}
    fill(head, rule, rename_by(rule, config, tensors), ends)
    factors = stored.get("rope_factors")
    if factors:
        rotary: Any = head.rotary
        rotary.inv_freq = rotary.inv_freq / torch.tensor(factors)
    return head.float().eval()


def read_engine_config(rule: Rule, kind: str, stored: Config, depth: int) -> Config:
    """treespec's config of a head whose stored config a project reads by a rule. depth: of the target."""
    config = list_own_fields(rule, stored)
    if kind == "medusa":
        return config
    raw = dict(stored)
    if rule.layer:
        raw = dict(get_nested_value(stored, rule.layer))
    qwen = raw.pop("model_type", rule.family.model_type) == "qwen3"
    family: type[PretrainedConfig] = LlamaConfig
    if qwen:
        family = Qwen3Config
    plain = {name: value for name, value in raw.items() if name not in config}
    config |= list_layer_fields(rule, family, plain)
    if kind == "dflash":
        ids = read_engine_aux_layers(rule, stored, depth)
        causal = read_causal_layers(rule, stored, config)
        return config | {"aux_hidden_state_layer_ids": ids, "own_output": True, "causal": causal}
    if kind == "eagle":
        return config
    return config | {TOP_IDS: read_engine_aux_layers(rule, stored, depth), "qk_norm": qwen}


def list_own_fields(rule: Rule, stored: Config) -> Config:
    """The fields of `Rule.fields`. Raises ValueError for one that the project demands and does not find."""
    config: Config = {}
    for name, (places, absent) in rule.fields.items():
        values = []
        for place in places.split("|"):
            value = get_nested_value(stored, place)
            if value is not None:
                values.append(value)
        if not values and absent is NO_DEFAULT:
            raise ValueError(f"{places} is missing, which {rule.source} demands")
        config[name] = max(values, default=absent, key=bool)
    return config


def list_layer_fields(rule: Rule, family: type[PretrainedConfig], plain: Config) -> Config:
    """The fields of a head's layers, with the defaults of the class that the project reads them with."""
    unread = {"rope_parameters": (), "rope_scaling": ("rope_parameters",)}
    for name in unread.get(rule.rotary, ("rope_parameters", "rope_scaling")):
        plain.pop(name, None)
    layer = family(**plain)
    rope = dict(layer.rope_parameters or {})
    part = plain.get("partial_rotary_factor", 1.0)
    if part != 1:
        rope["partial_rotary_factor"] = part
    fields: Config = {name: getattr(layer, name) for name in SIZES}
    fields["rope_parameters"] = rope
    if plain.get("layer_types"):
        fields["layer_types"] = plain["layer_types"]
        fields["sliding_window"] = plain.get("sliding_window")
    return fields


def read_engine_aux_layers(rule: Rule, stored: Config, depth: int) -> list[int]:
    """The layers that the features enter. depth: of the target. Raises ValueError where a project finds none."""
    if not rule.aux:
        return [2, depth // 2, depth - 3]
    ids = get_nested_value(stored, rule.aux)
    if ids is None:
        raise ValueError(f"{rule.aux} is missing, which {rule.source} demands")
    shift = 0
    if not rule.entered:
        shift = 1
    return [int(k) + shift for k in ids]


def read_causal_layers(rule: Rule, stored: Config, config: Config) -> list[bool]:
    """For each layer of DFlash whether a block row sees no later one.

    In speculators those with a window do not, unless a flag says otherwise; in llama.cpp a flag is for all layers.
    """
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    if types:
        layers = len(types)
    if not rule.layer:
        return [bool(stored["attention.causal"])] * layers
    if not types or stored.get("sliding_window_non_causal"):
        return [False] * layers
    return [kind == SLIDING_ATTENTION for kind in types]


def fill(head: Head, rule: Rule, tensors: Tensors, ends: Ends) -> None:
    """Give a head the tensors that a project reads, and the target's where it takes these."""
    # 1. The tensors that it reads. Its draft vocabulary follows from d2t.
    tensors = {
        name: value for name, value in tensors.items() if not re.fullmatch(rule.unused, name)
    }
    d2t = tensors.pop("d2t", None)
    take_ends(head, rule, tensors, ends)

    # 2. The head.
    if EMBEDDING_NAME not in tensors:
        head.embed_tokens = None
        head.share_embedding(nn.Parameter(ends.embedding, requires_grad=False))
    check_shapes(head, tensors, (EMBEDDING_NAME, "d2t", "t2d"))
    head.load_state_dict(tensors, strict=False)
    if (d2t is None) != (head.d2t is None):
        raise ValueError(f"d2t does not fit draft_vocab_size, as {rule.source} reads them")
    if d2t is not None:
        draft_by_offsets(head, d2t)


def take_ends(head: Head, rule: Rule, tensors: Tensors, ends: Ends) -> None:
    """Change the tensors in place where a project takes the target's embedding or output layer instead.

    Raises ValueError where the file lacks an embedding that the project demands.
    """
    if rule.embedding == "target":
        tensors.pop(EMBEDDING_NAME, None)
    elif rule.embedding == "demanded" and EMBEDDING_NAME not in tensors:
        raise ValueError(f"{EMBEDDING_NAME} is missing, which {rule.source} demands")
    if rule.output == "own if smaller" and len(tensors[OUTPUT]) == head.vocab_size:
        tensors[OUTPUT] = ends.output


def draft_by_offsets(head: Head, d2t: Tensor) -> None:
    """Let a head draft the tokens that d2t [Vd] names. Raises ValueError for tokens that cannot be."""
    tokens = d2t + torch.arange(len(d2t))
    if tokens.min() < 0 or tokens.max() >= head.vocab_size:
        raise ValueError("d2t leads to tokens that the target does not have")
    head.draft(tokens)


def get_nested_value(config: Config, place: str) -> Any:
    """The value at a place such as `eagle_config.norm_before_fc`; None where there is none."""
    value: Any = config
    for part in place.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value.get(part)
        else:
            return None
    return value


def rename_by(rule: Rule, config: Config, tensors: Tensors) -> Tensors:
    """The tensors by the head's names. A replacement of `Rule.names` may hold a field of the config."""
    named: Tensors = {}
    for name, value in tensors.items():
        for pattern, replacement in rule.names:
            if "{" in replacement:
                replacement = replacement.format(**config)
            name = re.sub(pattern, replacement, name)
        named[name] = value
    return named


def read_header(file: Path, kind: str) -> tuple[Config, Tensors]:
    """What llama.cpp reads of a GGUF file: its fields by the names of a Llama, and its tensors.

    llama.cpp turns neighbours in EAGLE-3's queries and keys, treespec halves: row 2 i of a head is row i.
    """
    # 1. The fields.
    reader = GGUFReader(file)
    keys = {key.removeprefix(f"{kind}."): value.contents() for key, value in reader.fields.items()}
    config = dict(keys)
    for name, key in HEADER_FIELDS.items():
        if key in keys:
            config[name] = keys[key]
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern:
        config["layer_types"] = [LAYER_TYPES[bool(slides)] for slides in pattern]

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
