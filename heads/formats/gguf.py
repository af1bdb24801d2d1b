"""EAGLE-3 and DFlash heads for llama.cpp: one GGUF file, beside the config.json that treespec reads.

In EAGLE-3 heads llama.cpp rotates neighbouring rows of queries and keys; treespec and the other projects
rotate halves. So the rows are permuted. An attention head of width 6:

    treespec's row       0  1  2  3  4  5      0 rotates with 3, 1 with 4, 2 with 5
    llama.cpp's row      0  3  1  4  2  5      the same pairs, side by side

An EAGLE-3 file holds no tokenizer, because llama.cpp drafts with the target's. For DFlash, llama.cpp looks up
the mask token in the file's vocabulary, so that file has a vocabulary whose tokens are numbers.
"""

import re
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter, quants
from torch import Tensor
from transformers import LlamaConfig

from treespec.errors import InputError
from treespec.files.atomic import write_json
from treespec.heads.folder import GGUF_FILE
from treespec.heads.head import Config, Tensors
from treespec.heads.layers import SLIDING_ATTENTION, Rotary

FUSED_NORM = {
    "eagle3": "input_norm",
    "dflash": "hidden_norm",
}  # the norm over all aux hidden states
LAYER_PATTERNS = {"eagle3": r"midlayer()", "dflash": r"layers\.(\d+)"}
MODULE_NAMES = {  # treespec's name of a module -> llama.cpp's
    "fc": "fc",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}
LAYER_MODULE_NAMES = {  # treespec's name of a module in a layer -> llama.cpp's after `blk.N`
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
NAME_BY_GGUF = {gguf_name: name for name, gguf_name in MODULE_NAMES.items()}
LAYER_BY_GGUF = {gguf_name: name for name, gguf_name in LAYER_MODULE_NAMES.items()}
PERMUTED_TENSORS = {  # EAGLE-3's tensors with permuted rows -> the key of their number of attention heads
    "blk.0.attn_q.weight": "attention.head_count",
    "blk.0.attn_k.weight": "attention.head_count_kv",
}
SIZE_KEYS = {  # the file's name of a size -> config.json's
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "target_hidden_size": "target_hidden_size",
}
FILE_KEYS = (  # further fields that treespec writes after the prefix of the head's kind
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "target_layers",
)
KIND_KEYS = {
    "eagle3": ("norm_before_residual", "norm_before_fc"),
    "dflash": (
        "block_size",
        "attention.causal",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
    ),
}
FREQUENCY_FACTORS = "rope_freqs.weight"
GGUF_ROTARY_TYPES = ("default", "linear", "llama3")  # types that frequency factors can express
GGUF_TYPES = {torch.float16: Type.F16, torch.bfloat16: Type.BF16}
DTYPES_BY_GGUF = {Type.F16: torch.float16, Type.BF16: torch.bfloat16}


def write_gguf(folder: Path, config: Config, tensors: Tensors) -> None:
    """Write config.json and the GGUF file.

    Args:
        folder: an existing folder.
        config: the fields of config.json: vLLM's for EAGLE-3, treespec's for DFlash.
        tensors: the tensors by treespec's names.

    Raises:
        ValueError: for rotary positions that llama.cpp cannot compute.
    """
    # 1. The fields.
    writer = GGUFWriter(str(folder / GGUF_FILE), choose_gguf_kind(config))
    if choose_gguf_kind(config) == "dflash":
        add_dflash_fields(writer, config)
    else:
        add_eagle3_fields(writer, config)
    writer.add_float32(f"{writer.arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{writer.arch}.rope.freq_base", config["rope_theta"])

    # 2. The tensors.
    llama_fields = {name: value for name, value in config.items() if name != "model_type"}
    factors = compute_frequency_factors(LlamaConfig(**llama_fields))
    if not factors.allclose(torch.ones(1, dtype=torch.float32, device="cpu")):
        writer.add_tensor(FREQUENCY_FACTORS, factors.numpy())
    for name in sorted(tensors.keys() - {"t2d"}):
        add_head_tensor(writer, config, name, tensors[name].detach().cpu().contiguous())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_json(folder / "config.json", config)


def choose_gguf_kind(config: Config) -> str:
    """The kind of head in a config.json for llama.cpp: only DFlash's has a block size."""
    if "block_size" in config:
        return "dflash"
    return "eagle3"


def add_eagle3_fields(writer: GGUFWriter, config: Config) -> None:
    """Add the sizes, and the fields of EAGLE-3 heads."""
    writer.add_tokenizer_model("none")
    add_sizes(writer, config)
    for name in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"eagle3.{name}", config[name])
    writer.add_array("eagle3.target_layers", config["eagle_aux_hidden_state_layer_ids"])


def add_dflash_fields(writer: GGUFWriter, config: Config) -> None:
    """Add the sizes, the fields of DFlash heads, and a vocabulary of numbers."""
    # 1. Windows and the mask token.
    sliding = bool(config.get("layer_types"))
    if sliding:
        windows = [kind == SLIDING_ATTENTION for kind in config["layer_types"]]
        writer.add_array("dflash.attention.sliding_window_pattern", windows)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([str(token) for token in range(config["vocab_size"])])
    writer.add_mask_token_id(config["mask_token_id"])

    # 2. Numbers, the flag and the layers.
    add_sizes(writer, config)
    writer.add_uint32("dflash.block_size", config["block_size"])
    if sliding:
        writer.add_uint32("dflash.attention.sliding_window", config["sliding_window"])
    writer.add_bool("dflash.attention.causal", all(config["causal"]))
    writer.add_array("dflash.target_layers", config["aux_hidden_state_layer_ids"])


def add_sizes(writer: GGUFWriter, config: Config) -> None:
    """Add the sizes of `SIZE_KEYS`."""
    for key, name in SIZE_KEYS.items():
        writer.add_uint32(f"{writer.arch}.{key}", config[name])


def add_head_tensor(writer: GGUFWriter, config: Config, name: str, value: Tensor) -> None:
    """Add a tensor under llama.cpp's name. llama.cpp wants vectors in float32, and absolute ids in d2t.

    Args:
        writer: the file's writer; `arch` is the kind of head.
        config: config.json, with the numbers of attention heads.
        name: treespec's name of the tensor.
        value: the tensor, on the CPU.
    """
    gguf_name = to_gguf_name(name, writer.arch)
    if gguf_name == "d2t":
        writer.add_tensor(gguf_name, (value + torch.arange(len(value), device="cpu")).numpy())
        return
    if writer.arch == "eagle3" and gguf_name in PERMUTED_TENSORS:
        heads = config[SIZE_KEYS[PERMUTED_TENSORS[gguf_name]]]
        value = permute_rotary_rows(value, heads)
    gguf_type = Type.F32
    if value.dim() > 1:
        gguf_type = GGUF_TYPES.get(value.dtype, Type.F32)
    writer.add_tensor(
        gguf_name, quants.quantize(value.float().numpy(), gguf_type), raw_dtype=gguf_type
    )


def to_gguf_name(name: str, kind: str) -> str:
    """Turn treespec's name of a tensor into llama.cpp's. Raises ValueError if llama.cpp has none for it."""
    if name == "d2t":
        return name
    module = name.removesuffix(".weight")
    layer = re.fullmatch(rf"{LAYER_PATTERNS[kind]}\.(.+)", module)
    if layer is not None:
        number = layer[1] or "0"
        inside = LAYER_MODULE_NAMES.get(layer[2])
        if inside is not None:
            return f"blk.{number}.{inside}.weight"
    elif module in MODULE_NAMES:
        return f"{MODULE_NAMES[module]}.weight"
    elif module == FUSED_NORM[kind]:
        return "enc.output_norm.weight"
    raise ValueError(f"its tensor {name} has no place in llama.cpp's file")


def from_gguf_name(gguf_name: str, kind: str) -> str:
    """Turn llama.cpp's name of a tensor into treespec's; an unknown name stays as it is."""
    module = gguf_name.removesuffix(".weight")
    layer = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
    if layer is not None:
        inside = LAYER_BY_GGUF.get(layer[2], layer[2])
        if kind == "eagle3":
            return f"midlayer.{inside}.weight"
        return f"layers.{layer[1]}.{inside}.weight"
    if module == "enc.output_norm":
        return f"{FUSED_NORM[kind]}.weight"
    if module in NAME_BY_GGUF:
        return f"{NAME_BY_GGUF[module]}.weight"
    return gguf_name


def read_gguf(file: Path) -> Tensors:
    """Read the tensors of a GGUF file by treespec's names, in the dtype of its `fc`.

    Raises ValueError for a file of another architecture, InputError for an unknown field.
    """
    # 1. The kind of head, and the dtype of its `fc`.
    reader = GGUFReader(file)
    kind = find_gguf_kind(reader)
    if kind is None:
        raise ValueError(f"{file} holds no EAGLE-3 or DFlash head")
    check_keys(reader, kind, file)
    stored_tensors = {tensor.name: tensor for tensor in reader.tensors}
    dtype = DTYPES_BY_GGUF.get(stored_tensors["fc.weight"].tensor_type, torch.float32)

    # 2. The tensors.
    tensors: Tensors = {}
    for gguf_name, tensor in stored_tensors.items():
        if gguf_name == FREQUENCY_FACTORS:  # they follow from config.json
            continue
        if gguf_name == "d2t":
            tokens = torch.from_numpy(tensor.data.astype(np.int64))
            tensors[gguf_name] = tokens - torch.arange(len(tokens), device="cpu")
            continue
        value = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if kind == "eagle3" and gguf_name in PERMUTED_TENSORS:
            heads = read_number(reader, f"{kind}.{PERMUTED_TENSORS[gguf_name]}")
            value = permute_rotary_rows(value, heads, back=True)
        tensors[from_gguf_name(gguf_name, kind)] = value.to(dtype)
    return tensors


def find_gguf_kind(reader: GGUFReader) -> str | None:
    """Find the kind of head in a file; None if it holds no head."""
    for kind in LAYER_PATTERNS:
        if f"{kind}.target_layers" in reader.fields:
            return kind
    return None


def read_number(reader: GGUFReader, key: str) -> int:
    """Read a whole number from a field of the file."""
    field = reader.fields[key]
    return int(field.parts[field.data[0]][0])


def check_keys(reader: GGUFReader, kind: str, file: Path) -> None:
    """Raises InputError for a field with the prefix of the head's kind that treespec does not know."""
    known_keys = set(SIZE_KEYS).union(FILE_KEYS, KIND_KEYS[kind])
    prefix = f"{kind}."
    for key in reader.fields:
        if key.startswith(prefix) and key.removeprefix(prefix) not in known_keys:
            raise InputError(f"{file} has a field {key}, which treespec does not know")


def permute_rotary_rows(weight: Tensor, heads: int, back: bool = False) -> Tensor:
    """Permute the rows of a projection [heads · D, H] for llama.cpp's rotation. back: for treespec's again."""
    inner = weight.shape[1]
    pairs = weight.view(heads, 2, -1, inner)
    if back:
        pairs = weight.view(heads, -1, 2, inner)
    return pairs.transpose(1, 2).reshape(weight.shape)


def compute_frequency_factors(config: LlamaConfig) -> Tensor:
    """Compute the factors [D / 2] by which llama.cpp divides its plain rotary frequencies.

    Raises ValueError for rotary positions that such factors cannot express.
    """
    rope: Config = dict(config.rope_parameters or {})
    kind = rope["rope_type"]
    frequencies = Rotary(config).inv_freq
    width = config.head_dim or 0
    problem = None
    if kind not in GGUF_ROTARY_TYPES:
        problem = kind
    elif 2 * len(frequencies) != width:
        problem = "part of a head is rotated"
    if problem is not None:
        raise ValueError(f"its rotary positions ({problem}) have no place in llama.cpp's file")
    shares = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    return rope["rope_theta"] ** -shares / frequencies
