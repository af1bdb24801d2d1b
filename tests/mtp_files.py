"""Tiny targets whose files hold MTP layers, by the names that their families publish."""

from typing import Any

import torch
import transformers as hf
from equality import seeded
from models import GROUPED, random_model
from safetensors.torch import load_file, save_file

MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_routed_experts": 4}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
MLA |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1}
CONFIGS: dict[str, Any] = {
    "deepseek": lambda: hf.DeepseekV3Config(
        **GROUPED | {"num_key_value_heads": 4} | MOE,
        **MLA,
    ),
    "glm": lambda: hf.Glm4MoeConfig(**GROUPED | MOE, head_dim=8, use_qk_norm=True, num_nextn_predict_layers=1),
    "qwen": lambda: hf.Qwen3NextConfig(
        **GROUPED,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mimo": lambda: hf.Qwen2Config(**GROUPED),  # MiMo's own code makes Qwen2's layers
}
# layout: (start of layer N's names, names around the decoder layer: embedding, hidden, projection, end)
DEEPSEEK = "model.layers.{}.", ("{}enorm", "{}hnorm", "{}eh_proj", "{}shared_head.norm")
NAMES = {
    "deepseek": DEEPSEEK,
    "glm": DEEPSEEK,
    "qwen": ("mtp.layers.{}.", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")),
    "mimo": (
        "model.mtp_layers.{}.",
        ("{}token_layernorm", "{}hidden_layernorm", "{}input_proj", "{}final_layernorm"),
    ),
}


def names_of(layout, number, layers):
    """The start of an MTP layer's names and its four parts. layers: of the target."""
    start, parts = NAMES[layout]
    before = start.format(number + (layers if layout in ("deepseek", "glm") else 0))
    return before, [part.format(before) for part in parts]


def decoder_layer(model):
    """A new layer like the model's last."""
    return type(model.model.layers[-1])(model.config, model.config.num_hidden_layers - 1)


def mtp_tensors(model, layout, layers=1, seed=3):
    """Random MTP layers for a model, by the published names."""
    generator = seeded(seed)

    def drawn(*shape):
        return 0.25 * torch.randn(*shape, generator=generator)

    tensors = {}
    width = model.config.hidden_size
    for number in range(layers):
        before, parts = names_of(layout, number, model.config.num_hidden_layers)
        sizes = ((width,), (width,), (width, 2 * width), (width,))
        for part, size in zip(parts, sizes, strict=True):
            tensors[f"{part}.weight"] = drawn(*size) + (len(size) == 1)
        for name, value in decoder_layer(model).state_dict().items():
            tensors[before + name] = drawn(*value.shape) + ("norm" in name)
    return tensors


def add_tensors(folder, tensors, drop=None):
    """Add tensors to a directory's only file, and drop one of that name."""
    file = folder / "model.safetensors"
    held = load_file(file) | tensors
    save_file({name: held[name].contiguous() for name in held if name != drop}, file, metadata={"format": "pt"})


def save_with_mtp(folder, layout, layers=1):
    """A random target of a family, with MTP layers in its file."""
    model = random_model(CONFIGS[layout]())
    model.save_pretrained(folder)
    add_tensors(folder, mtp_tensors(model, layout, layers))
    return folder
