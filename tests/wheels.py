"""Wheels in a folder that pip takes packages from, and a tiny GGUF model for one."""

import hashlib
import zipfile

import gguf
import torch
from evaluating import SPECIAL, TEMPLATE
from gguf_files import write_gguf
from models import random_model
from tokenizers import pre_tokenizers
from transformers import LlamaConfig

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


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


@torch.no_grad()
def write_demo(path):
    """Write a random Llama as Q4_1, with its tokenizer. Returns the model with the file's weights, in bfloat16's."""
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocab = {"vocab_size": len(symbols), "max_position_embeddings": 256, "tie_word_embeddings": True}
    model = random_model(LlamaConfig(**SIZE | vocab, num_key_value_heads=2, bos_token_id=1, eos_token_id=2))

    def tokenizer(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(symbols)
        writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(symbols) - 3))
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_pad_token_id(0)
        writer.add_chat_template(TEMPLATE)

    write_gguf(model, path, of_embedding="Q4_1", more=tokenizer)
    blocks = gguf.GGMLQuantizationType.Q4_1
    for weight in model.parameters():
        if weight.ndim > 1:
            read = gguf.dequantize(gguf.quantize(weight.numpy(), blocks), blocks)
            weight.copy_(torch.from_numpy(read).bfloat16())
        else:
            weight.copy_(weight.bfloat16())
    return model
