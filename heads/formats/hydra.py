"""Hydra's heads of zankner/Hydra, whose config lacks the target's sizes."""

from treespec.heads.head import Config, Stored, Tensors
from treespec.heads.known import hydra_heads

PREFIX = "prefix_embeding_layer."
LAYER = PREFIX + "layers.0."
OUTPUTS = ("hydra_lm_head.0.weight", "hydra_lm_head.0.1.weight")  # first head: Hydra's, Hydra++'s
UNUSED = {  # a copy of the target's embedding, and an embedding of the prefix layer, never read
    "input_embed_fn.weight",
    PREFIX + "embed_tokens.weight",
}
ANGLES = LAYER + "self_attn.rotary_emb.inv_freq"  # [D / 2], which follows from the config


def read(config: Config, tensors: Tensors) -> Stored:
    """Drop the unused tensors, and take missing config fields from the shapes of the others.

    Raises ValueError for features of another layer than the last, and if neither the config nor the
    tensors tell the number of attention heads of the prefix layer.
    """
    if config.get("hidden_state_offset"):
        raise ValueError(
            f"hidden_state_offset is {config['hidden_state_offset']}, of which only 0 is known"
        )
    output = next((tensors[name] for name in OUTPUTS if name in tensors), None)
    if output is None:
        raise ValueError(f"the head lacks {OUTPUTS[0]}; is it Hydra or Hydra++ heads?")
    vocab_size, hidden_size = output.shape
    by_shapes: Config = {
        "hydra_num_heads": hydra_heads(tensors),
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
    }
    if any(name.startswith(LAYER) for name in tensors):
        by_shapes |= _attention(config, tensors, hidden_size)
    config = config | {name: value for name, value in by_shapes.items() if name not in config}
    return config, {name: value for name, value in tensors.items() if name not in UNUSED | {ANGLES}}


def _attention(config: Config, tensors: Tensors, width: int) -> dict[str, int]:
    """Sizes of the prefix layer. The number of rotary angles, D / 2, tells the head count."""
    if "num_attention_heads" in config:
        heads = config["num_attention_heads"]
    elif ANGLES in tensors:
        heads = width // (2 * len(tensors[ANGLES]))
    else:
        base = config.get("base_model_name_or_path", "the target")
        raise ValueError(
            f"num_attention_heads is missing, and the file does not tell: add what {base} has"
        )
    sizes = {"num_attention_heads": heads}
    for field, name, size in (
        ("num_key_value_heads", "self_attn.k_proj.weight", width // heads),
        ("intermediate_size", "mlp.gate_proj.weight", 1),
    ):
        if LAYER + name in tensors:
            sizes[field] = len(tensors[LAYER + name]) // size
    return sizes
