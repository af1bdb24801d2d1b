"""EAGLE-3 heads for llama.cpp: one GGUF file, beside the config.json that treespec reads.

llama.cpp rotates neighbours, all others rotate halves. So the rows of each head of queries and keys
change places:

    row of the others    0  1  2  3  4  5      0 turns with 3, 1 with 4, 2 with 5
    row of llama.cpp     0  3  1  4  2  5      the same pairs, side by side

The file holds no tokenizer. llama.cpp drafts with the target's.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter, quants
from torch import Tensor
from transformers import LlamaConfig

from treespec.files.atomic import write_json
from treespec.heads.folder import GGUF
from treespec.heads.head import Config, Tensors
from treespec.heads.layers import Rotary

ARCHITECTURE = "eagle3"
NAMES = {  # of tensors: llama.cpp's. `blk.0` is the head's layer
    "d2t": "d2t",
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
TURNED = {
    "blk.0.attn_q.weight": "",
    "blk.0.attn_k.weight": "_kv",
}  # ends of the keys of their heads' number
FACTORS = "rope_freqs.weight"
ROTARY = ("default", "linear", "llama3")  # that factors of the frequencies describe
TYPES = {torch.float16: Type.F16, torch.bfloat16: Type.BF16}


def write_gguf(folder: Path, config: Config, tensors: Tensors) -> None:
    """Write config.json and the GGUF file. config, tensors: as for vLLM.

    Raises ValueError for rotary positions that llama.cpp computes otherwise.
    """
    # 1. The numbers.
    own = LlamaConfig(**{name: config[name] for name in config if name != "model_type"})
    writer = GGUFWriter(str(folder / GGUF), ARCHITECTURE)
    sizes: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": 1,
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "rope.dimension_count": config["head_dim"],
        "target_hidden_size": config["target_hidden_size"],
    }
    for name, number in sizes.items():
        writer.add_uint32(f"{ARCHITECTURE}.{name}", number)
    writer.add_array(f"{ARCHITECTURE}.target_layers", config["eagle_aux_hidden_state_layer_ids"])
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", config["rope_theta"])
    for name in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"{ARCHITECTURE}.{name}", config[name])
    writer.add_tokenizer_model("none")

    # 2. The tensors. llama.cpp takes vectors in float32.
    factors = factors_of(own)
    if not factors.allclose(torch.ones(1)):
        writer.add_tensor(FACTORS, factors.numpy())
    for name in sorted(tensors.keys() - {"t2d"}):
        value, known = tensors[name].detach().cpu().contiguous(), NAMES[name]
        if known == "d2t":  # absolute ids
            writer.add_tensor(known, (value + torch.arange(len(value))).numpy())
            continue
        if known in TURNED:
            value = turned(value, sizes[f"attention.head_count{TURNED[known]}"])
        kind = TYPES.get(value.dtype, Type.F32) if value.dim() > 1 else Type.F32
        writer.add_tensor(known, quants.quantize(value.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_json(folder / "config.json", config)


def read_gguf(file: Path) -> Tensors:
    """The tensors of such a file by treespec's names, in the precision of its `fc`.

    Raises ValueError for a file of another architecture.
    """
    reader, named = GGUFReader(file), {known: name for name, known in NAMES.items()}

    def number(key: str) -> Any:
        field = reader.fields[f"{ARCHITECTURE}.{key}"]
        return field.parts[field.data[0]][0]

    if f"{ARCHITECTURE}.target_layers" not in reader.fields:
        raise ValueError(f"{file} holds no EAGLE-3 head")
    stored = {one.name: one for one in reader.tensors}
    own = stored["fc.weight"].tensor_type
    dtype = next((dtype for dtype, kind in TYPES.items() if kind == own), torch.float32)
    tensors: Tensors = {}
    for known, one in stored.items():
        if known == "d2t":
            ids = torch.from_numpy(one.data.astype(np.int64))
            marked = torch.zeros(int(number("vocab_size")), dtype=torch.bool)
            tensors |= {
                "d2t": ids - torch.arange(len(ids)),
                "t2d": marked.index_fill_(0, ids, True),
            }
        elif known != FACTORS:
            value = torch.from_numpy(quants.dequantize(one.data, one.tensor_type).copy())
            if known in TURNED:
                heads = int(number(f"attention.head_count{TURNED[known]}"))
                value = turned(value, heads, back=True)
            tensors[named.get(known, known)] = value.to(dtype)
    return tensors


def turned(weight: Tensor, heads: int, back: bool = False) -> Tensor:
    """The rows of a projection [heads · D, H] for llama.cpp's rotation. back: for the others'."""
    parts = (heads, -1, 2) if back else (heads, 2, -1)
    return weight.view(*parts, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def factors_of(config: LlamaConfig) -> Tensor:
    """[D / 2] by what llama.cpp divides its frequencies. Raises ValueError where they do not tell all."""
    rope: Config = dict(config.rope_parameters or {})
    kind, frequencies, width = rope["rope_type"], Rotary(config).inv_freq, config.head_dim or 0
    if kind not in ROTARY or 2 * len(frequencies) != width:
        part = "part of each head is rotated" if kind in ROTARY else kind
        raise ValueError(f"its rotary positions ({part}) have no place in llama.cpp's file")
    return rope["rope_theta"] ** -(torch.arange(0, width, 2) / width) / frequencies
