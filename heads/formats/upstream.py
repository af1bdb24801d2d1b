"""Read an exported folder as the other project reads it, to check the export.

This shares no code with treespec's readers, so a writer's wrong belief about a project shows as different logits.
A `Rule` says what the project's code does. treespec's head then computes what the project would:

    config.json, tensors ──▶ fields, or their defaults ──▶ tensors by treespec's names
                         ──▶ the target's embedding or output layer, if the project takes it ──▶ logits
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
HEADER_FIELDS = {  # Llama's name of a field -> llama.cpp's
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
LAYER_TYPES = {
    True: SLIDING_ATTENTION,
    False: FULL_ATTENTION,
}  # whether a layer has a sliding window -> its type


@dataclass(frozen=True)
class Ends:
    """The target's embedding and output layer, [V, H] each, for heads that use either (a `TargetOutputPath`)."""

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
    """Read the head that a project would run from a folder, in float32.

    Args:
        to: the format.
        kind: the kind of head.
        folder: the exported folder.
        ends: the target's embedding and output layer.
        depth: the number of the target's layers.

    Raises:
        ValueError: for a missing field or tensor that the project requires, and for an unknown tensor.
    """
    rule = RULES[to, kind]
    if to == "gguf":
        stored_config, tensors = read_header(folder / GGUF_FILE, kind)
    else:
        stored_config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
    config = read_engine_config(rule, kind, stored_config, depth)
    head: Head = HEAD_KINDS[kind].build()(config)
    if rule.biases and not stored_config.get(rule.biases):
        tensors |= {name: 0 * tensors[name] for name in tensors if name.endswith(".bias")}
    fill(head, rule, rename_by(rule, config, tensors), ends)
    factors = stored_config.get("rope_factors")
    if factors:
        rotary: Any = head.rotary
        rotary.inv_freq = rotary.inv_freq / torch.tensor(factors, dtype=torch.float32, device="cpu")
    return head.float().eval()


def read_engine_config(rule: Rule, kind: str, stored_config: Config, depth: int) -> Config:
    """Turn a stored config into treespec's, as a project reads it.

    Args:
        rule: the project's rule.
        kind: the kind of head.
        stored_config: config.json, or the fields of a GGUF file.
        depth: the number of the target's layers.

    Returns:
        The config that the class of this kind takes.
    """
    config = list_own_fields(rule, stored_config)
    if kind == "medusa":
        return config
    raw = dict(stored_config)
    if rule.layer:
        raw = dict(get_nested_value(stored_config, rule.layer))
    qwen = raw.pop("model_type", rule.family.model_type) == "qwen3"
    family: type[PretrainedConfig] = LlamaConfig
    if qwen:
        family = Qwen3Config
    plain = {name: value for name, value in raw.items() if name not in config}
    config |= list_layer_fields(rule, family, plain)
    if kind == "dflash":
        ids = read_engine_aux_layers(rule, stored_config, depth)
        causal = read_causal_layers(rule, stored_config, config)
        return config | {"aux_hidden_state_layer_ids": ids, "own_output": True, "causal": causal}
    if kind == "eagle":
        return config
    return config | {TOP_IDS: read_engine_aux_layers(rule, stored_config, depth), "qk_norm": qwen}


def list_own_fields(rule: Rule, stored_config: Config) -> Config:
    """Read the fields of `Rule.fields`. Raises ValueError for a missing field that the project requires."""
    config: Config = {}
    for name, (paths, absent) in rule.fields.items():
        values = []
        for path in paths.split("|"):
            value = get_nested_value(stored_config, path)
            if value is not None:
                values.append(value)
        if not values and absent is NO_DEFAULT:
            raise ValueError(f"{paths} is missing, which {rule.source} demands")
        config[name] = max(values, default=absent, key=bool)
    return config


def list_layer_fields(rule: Rule, family: type[PretrainedConfig], plain: Config) -> Config:
    """Read the fields of a head's layers, with the defaults of the project's config class."""
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


def read_engine_aux_layers(rule: Rule, stored_config: Config, depth: int) -> list[int]:
    """Read the aux layers: the target's layers that the features enter. depth: the number of the target's layers.

    Raises ValueError if the field that the project requires is missing.
    """
    if not rule.aux:
        return [2, depth // 2, depth - 3]
    ids = get_nested_value(stored_config, rule.aux)
    if ids is None:
        raise ValueError(f"{rule.aux} is missing, which {rule.source} demands")
    shift = 0
    if not rule.entered:
        shift = 1
    return [int(k) + shift for k in ids]


def read_causal_layers(rule: Rule, stored_config: Config, config: Config) -> list[bool]:
    """For each layer of a DFlash head, whether it is causal: a block row sees no later block rows.

    In speculators layers with a window are causal, unless a flag says otherwise. llama.cpp has one flag for all layers.
    """
    layers = config["num_hidden_layers"]
    types = config.get("layer_types")
    if types:
        layers = len(types)
    if not rule.layer:
        return [bool(stored_config["attention.causal"])] * layers
    if not types or stored_config.get("sliding_window_non_causal"):
        return [False] * layers
    return [kind == SLIDING_ATTENTION for kind in types]


def fill(head: Head, rule: Rule, tensors: Tensors, ends: Ends) -> None:
    """Load the tensors that a project reads into a head, and the target's that the project takes instead.

    Args:
        head: the head, changed in place.
        rule: the project's rule.
        tensors: the file's tensors by treespec's names.
        ends: the target's embedding and output layer.
    """
    # 1. The tensors that the project reads. The draft vocabulary follows from d2t.
    tensors = {
        name: value for name, value in tensors.items() if not re.fullmatch(rule.unused, name)
    }
    d2t = tensors.pop("d2t", None)
    take_ends(head, rule, tensors, ends)

    # 2. Load them.
    if EMBEDDING_NAME not in tensors:
        head.embed_tokens = None
        head.share_embedding(nn.Parameter(ends.embedding, requires_grad=False))
    check_shapes(head, tensors, (EMBEDDING_NAME, "d2t", "t2d"))
    head.load_state_dict(tensors, strict=False)  # only those three may be missing, as was checked
    if (d2t is None) != (head.d2t is None):
        raise ValueError(f"d2t does not fit draft_vocab_size, as {rule.source} reads them")
    if d2t is not None:
        draft_by_offsets(head, d2t)


def take_ends(head: Head, rule: Rule, tensors: Tensors, ends: Ends) -> None:
    """Replace the embedding or output layer in `tensors`, in place, if the project takes the target's.

    Raises ValueError if the file lacks an embedding that the project requires.
    """
    if rule.embedding == "target":
        tensors.pop(EMBEDDING_NAME, None)
    elif rule.embedding == "demanded" and EMBEDDING_NAME not in tensors:
        raise ValueError(f"{EMBEDDING_NAME} is missing, which {rule.source} demands")
    if rule.output == "own if smaller" and len(tensors[OUTPUT]) == head.vocab_size:
        tensors[OUTPUT] = ends.output


def draft_by_offsets(head: Head, d2t: Tensor) -> None:
    """Set the draft vocabulary of a head by d2t [Vd]. Raises ValueError for tokens outside the vocabulary."""
    tokens = d2t + torch.arange(len(d2t), device="cpu")
    if tokens.min() < 0 or tokens.max() >= head.vocab_size:
        raise ValueError("d2t leads to tokens that the target does not have")
    head.draft(tokens)


def get_nested_value(config: Config, path: str) -> Any:
    """The value at a path such as `eagle_config.norm_before_fc`; None if there is none."""
    value: Any = config
    for part in path.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, dict):
            value = value.get(part)
        else:
            return None
    return value


def rename_by(rule: Rule, config: Config, tensors: Tensors) -> Tensors:
    """Rename the tensors to treespec's names. A replacement in `Rule.names` may hold {a field of the config}."""
    renamed: Tensors = {}
    for name, value in tensors.items():
        for pattern, replacement in rule.names:
            if "{" in replacement:
                replacement = replacement.format(**config)
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


def read_header(file: Path, kind: str) -> tuple[Config, Tensors]:
    """Read a GGUF file as llama.cpp does: its fields by Llama's names, and its tensors.

    In EAGLE-3's queries and keys llama.cpp rotates neighbouring rows, treespec halves: its row 2 i is our row i.
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
    for tensor in reader.tensors:
        if tensor.name == "d2t":
            ids = torch.from_numpy(tensor.data.astype(np.int64))
            tensors["d2t"] = ids - torch.arange(len(ids), device="cpu")
            config["draft_vocab_size"] = len(ids)
            continue
        value = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name == "rope_freqs.weight":
            config["rope_factors"] = value.tolist()
            continue
        if kind == "eagle3" and re.search(r"attn_[qk]\.", tensor.name):
            size = config["head_dim"]
            order = torch.cat(
                [torch.arange(0, size, 2, device="cpu"), torch.arange(1, size, 2, device="cpu")]
            )
            value = value.view(-1, size, value.shape[1])[:, order].flatten(0, 1)
        tensors[tensor.name] = value
    return config, tensors
