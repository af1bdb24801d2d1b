"""EAGLE-3 and DFlash heads for llama.cpp: one GGUF file, beside the config.json that treespec reads.

In EAGLE-3 heads llama.cpp rotates neighbours, and all others rotate halves. So the rows of queries and keys
change places:

    row of the others    0  1  2  3  4  5      0 turns with 3, 1 with 4, 2 with 5
    row of llama.cpp     0  3  1  4  2  5      the same pairs, side by side

The file holds no tokenizer, because llama.cpp drafts with the target's. It finds the mask token of DFlash
in a vocabulary of the file, so that has one, whose tokens are numbers.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter, quants
from torch import Tensor
from transformers import LlamaConfig

from treespec.errors import InputError
from treespec.files.atomic import write_json
from treespec.heads.folder import GGUF
from treespec.heads.head import Config, Tensors
from treespec.heads.layers import SLIDING, Rotary

FUSED_NORM = {"eagle3": "input_norm", "dflash": "hidden_norm"}  # of the fused aux hidden states
LAYERS = {"eagle3": r"midlayer()", "dflash": r"layers\.(\d+)"}
NAMES = {  # of modules: llama.cpp's
    "fc": "fc",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
LAYER = {  # of modules of a layer: llama.cpp's below `blk.N`
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TURNED = {  # in EAGLE-3: ends of the keys of their heads' number
    "blk.0.attn_q.weight": "",
    "blk.0.attn_k.weight": "_kv",
}
FILE_KEYS = (  # of the file's fields that treespec writes, below the head's kind
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.value_length", "attention.layer_norm_rms_epsilon", "rope.dimension_count"),
    *("rope.freq_base", "target_hidden_size", "target_layers"),
)
KIND_KEYS = {
    "eagle3": ("norm_before_residual", "norm_before_fc"),
    "dflash": (
        *("block_size", "attention.causal", "attention.sliding_window"),
        "attention.sliding_window_pattern",
    ),
}
FACTORS = "rope_freqs.weight"
ROTARY = ("default", "linear", "llama3")  # that factors of the frequencies describe
TYPES = {torch.float16: Type.F16, torch.bfloat16: Type.BF16}


def write_gguf(folder: Path, config: Config, tensors: Tensors) -> None:
    """Write config.json and the GGUF file. config, tensors: of EAGLE-3 as for vLLM, of DFlash its own.

    Raises ValueError for rotary positions that llama.cpp computes otherwise.
    """
    # 1. The numbers.
    kind = "dflash" if "block_size" in config else "eagle3"
    own = LlamaConfig(**{name: config[name] for name in config if name != "model_type"})
    writer = GGUFWriter(str(folder / GGUF), kind)
    sizes: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "target_hidden_size": config["target_hidden_size"],
    }
    reads = "eagle_aux_hidden_state_layer_ids"
    if kind == "dflash":
        reads = "aux_hidden_state_layer_ids"
        sizes["block_size"] = config["block_size"]
        if config.get("layer_types"):
            sizes["attention.sliding_window"] = config["sliding_window"]
            windows = [layer == SLIDING for layer in config["layer_types"]]
            writer.add_array(f"{kind}.attention.sliding_window_pattern", windows)
        writer.add_tokenizer_model("llama")
        writer.add_token_list([str(token) for token in range(config["vocab_size"])])
        writer.add_mask_token_id(config["mask_token_id"])
        flags = {"attention.causal": all(config["causal"])}
    else:
        writer.add_tokenizer_model("none")
        flags = {name: config[name] for name in ("norm_before_residual", "norm_before_fc")}
    for name, number in sizes.items():
        writer.add_uint32(f"{kind}.{name}", number)
    for name, flag in flags.items():
        writer.add_bool(f"{kind}.{name}", flag)
    writer.add_array(f"{kind}.target_layers", config[reads])
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{kind}.rope.freq_base", config["rope_theta"])

    # 2. The tensors. llama.cpp takes vectors in float32.
    factors = factors_of(own)
    if not factors.allclose(torch.ones(1)):
        writer.add_tensor(FACTORS, factors.numpy())
    for name in sorted(tensors.keys() - {"t2d"}):
        value = tensors[name].detach().cpu().contiguous()
        known = theirs(name, kind)
        if known == "d2t":  # absolute ids
            writer.add_tensor(known, (value + torch.arange(len(value))).numpy())
            continue
        if kind == "eagle3" and known in TURNED:
            value = turned(value, sizes[f"attention.head_count{TURNED[known]}"])
        stored = TYPES.get(value.dtype, Type.F32) if value.dim() > 1 else Type.F32
        writer.add_tensor(known, quants.quantize(value.float().numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_json(folder / "config.json", config)


def theirs(name: str, kind: str) -> str:
    """llama.cpp's name of a tensor. Raises ValueError for one that it has no place for."""
    if name == "d2t":
        return name
    module = name.removesuffix(".weight")
    layer = re.fullmatch(rf"{LAYERS[kind]}\.(.+)", module)
    if layer:
        known = LAYER.get(layer[2])
        number = layer[1] or "0"
        known = known and f"blk.{number}.{known}"
    else:
        known = NAMES.get(module) or {FUSED_NORM[kind]: "enc.output_norm"}.get(module)
    if not known:
        raise ValueError(f"its tensor {name} has no place in llama.cpp's file")
    return f"{known}.weight"


def ours(known: str, kind: str) -> str:
    """treespec's name of a tensor of the file; the same where it is none of the head."""
    module = known.removesuffix(".weight")
    named = {own: name for name, own in NAMES.items()}
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
    if layer:
        inside = {own: name for name, own in LAYER.items()}.get(layer[2], layer[2])
        above = "midlayer" if kind == "eagle3" else f"layers.{layer[1]}"
        return f"{above}.{inside}.weight"
    named["enc.output_norm"] = FUSED_NORM[kind]
    return f"{named[module]}.weight" if module in named else known


def read_gguf(file: Path) -> Tensors:
    """The tensors of such a file by treespec's names, in the precision of its `fc`.

    Raises ValueError for a file of another architecture, InputError for a field that is not known.
    """
    reader = GGUFReader(file)
    kind = next((kind for kind in LAYERS if f"{kind}.target_layers" in reader.fields), "")
    if not kind:
        raise ValueError(f"{file} holds no EAGLE-3 or DFlash head")
    check_keys(reader, kind, file)

    def number(key: str) -> Any:
        field = reader.fields[f"{kind}.{key}"]
        return field.parts[field.data[0]][0]

    stored = {one.name: one for one in reader.tensors}
    own = stored["fc.weight"].tensor_type
    dtype = next((dtype for dtype, known in TYPES.items() if known == own), torch.float32)
    tensors: Tensors = {}
    for known, one in stored.items():
        if known == "d2t":
            ids = torch.from_numpy(one.data.astype(np.int64))
            tensors[known] = ids - torch.arange(len(ids))
        elif known != FACTORS:
            value = torch.from_numpy(quants.dequantize(one.data, one.tensor_type).copy())
            if kind == "eagle3" and known in TURNED:
                heads = int(number(f"attention.head_count{TURNED[known]}"))
                value = turned(value, heads, back=True)
            tensors[ours(known, kind)] = value.to(dtype)
    return tensors


def check_keys(reader: GGUFReader, kind: str, file: Path) -> None:
    """Raises InputError for a field of the head's kind that treespec does not know, by its name."""
    keys = {f"{kind}.{key}" for key in (*FILE_KEYS, *KIND_KEYS[kind])}
    for key in reader.fields:
        if key.startswith(f"{kind}.") and key not in keys:
            raise InputError(f"{file} has a field {key}, which treespec does not know")


def turned(weight: Tensor, heads: int, back: bool = False) -> Tensor:
    """The rows of a projection [heads · D, H] for llama.cpp's rotation. back: for the others'."""
    parts = (heads, -1, 2) if back else (heads, 2, -1)
    return weight.view(*parts, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def factors_of(config: LlamaConfig) -> Tensor:
    """[D / 2] by what llama.cpp divides its frequencies. Raises ValueError where they do not tell all."""
    rope: Config = dict(config.rope_parameters or {})
    kind = rope["rope_type"]
    frequencies = Rotary(config).inv_freq
    width = config.head_dim or 0
    if kind not in ROTARY or 2 * len(frequencies) != width:
        part = "part of a head is rotated" if kind in ROTARY else kind
        raise ValueError(f"its rotary positions ({part}) have no place in llama.cpp's file")
    return rope["rope_theta"] ** -(torch.arange(0, width, 2) / width) / frequencies
