"""Wheels in a folder that pip takes packages from, and a tiny GGUF model for one."""

import hashlib
import zipfile

import gguf
import numpy as np
import torch
from models import random_model
from tokenizers import pre_tokenizers
from transformers import LlamaConfig

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = ["<pad>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
NAMES = {  # transformers' -> GGUF's
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_wheel(folder, package, version, member, content):
    """Write a wheel that holds one file. Returns its SHA-256."""
    name = f"{package.replace('-', '_')}-{version}"
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        about = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        archive.writestr(f"{name}.dist-info/METADATA", about)
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def write_gguf(path):
    """Write a random Llama as Q4_1. Returns the model with the file's weights, rounded to bfloat16."""
    # 1. Sizes and tokenizer.
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocab = {"vocab_size": len(symbols), "max_position_embeddings": 256, "tie_word_embeddings": True}
    model = random_model(LlamaConfig(**SIZE | vocab, num_key_value_heads=2, bos_token_id=1, eos_token_id=2))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SIZE["num_hidden_layers"])
    writer.add_context_length(256)
    writer.add_embedding_length(SIZE["hidden_size"])
    writer.add_feed_forward_length(SIZE["intermediate_size"])
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(len(symbols))
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(symbols)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(symbols) - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)

    # 2. Weights, quantised where they have rows.
    for name, weight in model.named_parameters():
        values = permuted(name, weight.detach()).numpy()
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            continue
        stored = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        read = torch.from_numpy(np.array(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q4_1)))
        weight.data.copy_(permuted(name, read, back=True).bfloat16())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def gguf_name(name):
    parts = name.removesuffix(".weight").split(".", 3)
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{NAMES[parts[3]]}.weight"
    return {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]] + ".weight"


def permuted(name, weight, back=False):
    """A query's or key's rows in GGUF's order: the halves of a head, which rotate together, alternate there."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
    if heads is None:
        return weight
    rows, columns = weight.shape
    parts = (heads, rows // heads // 2, 2) if back else (heads, 2, rows // heads // 2)
    return weight.reshape(*parts, columns).transpose(1, 2).reshape(rows, columns).contiguous()
