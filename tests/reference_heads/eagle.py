"""Heads that draft one token a step from a feature: EAGLE-3 with latent attention, EAGLE-4, and MTP layers.

Written from: EAGLE-3 over DeepSeek's attention as vLLM serves it (documentation of its deepseek_eagle3, September
2026), EAGLE-4 from NeMo AutoModel's pages of 26.10 (eagle4, draft_llama, export_eagle4), and MTP of speculators
0.9.0, read on 2026-11-30.
"""

import torch
from reference_heads.parts import (
    Checkpoint,
    attend,
    feed_forward,
    keep_best,
    multiply,
    normalise,
    rotate,
    rotate_neighbours,
    split_heads,
)
from torch import Tensor


def see_back(length: int, window: int | None) -> Tensor:
    """[T, T] each token sees itself and those before it, `window` of them in all."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


def attend_plainly(checkpoint: Checkpoint, name: str, x: Tensor) -> Tensor:
    """Llama's attention. x: [T, 2H]."""
    config, tensors = checkpoint
    width = config["head_dim"]
    positions = torch.arange(len(x))
    queries, keys, values = (split_heads(multiply(tensors, f"{name}.{part}_proj", x), width) for part in "qkv")
    queries = rotate(queries, positions, config["rope_theta"])
    keys = rotate(keys, positions, config["rope_theta"])
    seen = see_back(len(x), config.get("sliding_window"))
    return multiply(tensors, f"{name}.o_proj", attend(queries, keys, values, seen, width**-0.5))


def attend_latently(checkpoint: Checkpoint, name: str, x: Tensor, scale: float = 1.0, turn=rotate_neighbours) -> Tensor:
    """DeepSeek's attention: keys and values from one small vector a token, and one rotated key for all heads.

    scale: what a rotary scaling multiplies the scores by. turn: how positions rotate.
    """
    config, tensors = checkpoint
    plain, rotated, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    positions = torch.arange(len(x))
    theta, eps = config["rope_theta"], config["rms_norm_eps"]
    if config["q_lora_rank"] is None:
        queries = multiply(tensors, f"{name}.q_proj", x)
    else:
        small = normalise(tensors, f"{name}.q_a_layernorm", multiply(tensors, f"{name}.q_a_proj", x), eps)
        queries = multiply(tensors, f"{name}.q_b_proj", small)
    queries = split_heads(queries, plain + rotated)
    latent, shared_key = multiply(tensors, f"{name}.kv_a_proj_with_mqa", x).split([rank, rotated], dim=-1)
    latent = normalise(tensors, f"{name}.kv_a_layernorm", latent, eps)
    both = split_heads(multiply(tensors, f"{name}.kv_b_proj", latent), plain + config["v_head_dim"])
    keys, values = both.split([plain, config["v_head_dim"]], dim=-1)
    shared_key = turn(shared_key[None], positions, theta).expand(len(keys), -1, -1)
    queries = torch.cat([queries[..., :plain], turn(queries[..., plain:], positions, theta)], dim=-1)
    keys = torch.cat([keys, shared_key], dim=-1)
    mixed = attend(queries, keys, values, see_back(len(x), None), scale * (plain + rotated) ** -0.5)
    return multiply(tensors, f"{name}.o_proj", mixed)


def fuse(checkpoint: Checkpoint, aux: Tensor) -> Tensor:
    """[T, H] the feature of each token. aux: [T, 3H] three layers of the target."""
    config, tensors = checkpoint
    if config.get("fc_norm"):
        parts = aux.chunk(3, -1)
        aux = torch.cat(
            [normalise(tensors, f"fc_norm.{i}", part, config["rms_norm_eps"]) for i, part in enumerate(parts)], dim=-1
        )
    return multiply(tensors, "fc", aux)


def extrapolate(checkpoint: Checkpoint, embedded: Tensor, features: Tensor, attention) -> tuple[Tensor, Tensor]:
    """[T, H] the feature that is drafted at every pair, and the state that the output layer reads.

    embedded: the token after each feature.
    """
    config, tensors = checkpoint
    eps = config["rms_norm_eps"]
    name = "layers.0"
    normed = normalise(tensors, f"{name}.hidden_norm", features, eps)
    x = torch.cat([normalise(tensors, f"{name}.input_layernorm", embedded, eps), normed], dim=-1)
    residual = normed if config.get("norm_before_residual") else features
    x = residual + attention(checkpoint, f"{name}.self_attn", x)
    x = x + feed_forward(tensors, f"{name}.mlp", normalise(tensors, f"{name}.post_attention_layernorm", x, eps))
    state = normalise(tensors, "norm", x, eps)
    return (state if config.get("norm_output") else x), state


def draft_eagle(checkpoint: Checkpoint, embedding: Tensor, aux: Tensor, following, path, attention) -> Tensor:
    """[H] the state after a path. aux: [T, 3H]; following: T tokens, each after its feature."""
    features = fuse(checkpoint, aux)
    tokens = list(following)
    for token in (*path, None):
        drafted, states = extrapolate(checkpoint, embedding[tokens], features, attention)
        features = torch.cat([features, drafted[-1:]])
        tokens.append(token)
    return states[-1]


def choose_candidates(checkpoint: Checkpoint, state: Tensor, count: int) -> Tensor:
    """EAGLE-4's [V] logits: the tokens that a low-rank output layer finds, scored by the whole one."""
    tensors = checkpoint.tensors
    found = multiply(tensors, "efficient_lm_head", multiply(tensors, "efficient_lm_head_down_proj", state))
    return keep_best(multiply(tensors, "lm_head", state), found, count)
