"""Heads that draft a token a step from a feature, by the formulas of their authors: EAGLE-3, EAGLE-4, MTP; and PARD.

Written from: EAGLE-3 over DeepSeek's attention as vLLM serves it (deepseek_eagle3, September 2026), EAGLE-4 from NeMo
AutoModel's pages of 26.10 (eagle4, draft_llama, export_eagle4), MTP of speculators 0.9.0 and of FastMTP 5875b70, and
PARD 5dfe809; read on 2026-11-30.
"""

import math
from functools import partial

import torch
from reference_heads.parts import (
    Checkpoint,
    attend,
    feed_forward,
    keep_best,
    list_angles,
    list_yarn_angles,
    multiply,
    normalise,
    rotate,
    rotate_neighbours,
    split_heads,
)
from torch import Tensor


def see_back(length: int, window: int | None = None) -> Tensor:
    """[T, T] each token sees itself and those before it, `window` of them in all."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    return (distance >= 0) & (distance < (window or length))


def attend_plainly(checkpoint: Checkpoint, name: str, x: Tensor) -> Tensor:
    """Attention of Llama, Qwen2 and Qwen3."""
    config, tensors = checkpoint
    width = config["head_dim"]
    queries, keys, values = (split_heads(multiply(tensors, f"{name}.{part}_proj", x), width) for part in "qkv")
    if f"{name}.q_norm.weight" in tensors:
        queries = normalise(tensors, f"{name}.q_norm", queries, config["rms_norm_eps"])
        keys = normalise(tensors, f"{name}.k_norm", keys, config["rms_norm_eps"])
    angles = list_angles(len(x), width, config["rope_theta"])
    seen = see_back(len(x), config.get("sliding_window"))
    mixed = attend(rotate(queries, angles), rotate(keys, angles), values, seen, width**-0.5)
    return multiply(tensors, f"{name}.o_proj", mixed)


def scale_yarn(factor: float, share: float) -> float:
    return 1 + 0.1 * share * math.log(factor)


def attend_latently(checkpoint: Checkpoint, name: str, x: Tensor) -> Tensor:
    """DeepSeek's attention: keys and values from one small vector a token, and one rotated key for all heads."""
    config, tensors = checkpoint
    eps = config["rms_norm_eps"]
    plain = config["qk_nope_head_dim"]
    rotated = config["qk_rope_head_dim"]
    angles = list_angles(len(x), rotated, config["rope_theta"])
    scale = (plain + rotated) ** -0.5
    length = 1.0  # of a rotated point
    yarn = config.get("rope_scaling")
    if yarn:
        angles = list_yarn_angles(len(x), rotated, config["rope_theta"], yarn)
        whole = scale_yarn(yarn["factor"], yarn["mscale_all_dim"])
        length = scale_yarn(yarn["factor"], yarn["mscale"]) / whole
        scale *= whole**2
    if config["q_lora_rank"] is None:
        queries = multiply(tensors, f"{name}.q_proj", x)
    else:
        small = normalise(tensors, f"{name}.q_a_layernorm", multiply(tensors, f"{name}.q_a_proj", x), eps)
        queries = multiply(tensors, f"{name}.q_b_proj", small)
    queries = split_heads(queries, plain + rotated)
    sizes = [config["kv_lora_rank"], rotated]
    latent, shared_key = multiply(tensors, f"{name}.kv_a_proj_with_mqa", x).split(sizes, dim=-1)
    latent = normalise(tensors, f"{name}.kv_a_layernorm", latent, eps)
    both = split_heads(multiply(tensors, f"{name}.kv_b_proj", latent), plain + config["v_head_dim"])
    keys, values = both.split([plain, config["v_head_dim"]], dim=-1)
    shared_key = length * rotate_neighbours(shared_key[None], angles).expand(len(keys), -1, -1)
    turned = length * rotate_neighbours(queries[..., plain:], angles)
    queries = torch.cat([queries[..., :plain], turned], dim=-1)
    mixed = attend(queries, torch.cat([keys, shared_key], dim=-1), values, see_back(len(x)), scale)
    return multiply(tensors, f"{name}.o_proj", mixed)


def run_layer(checkpoint: Checkpoint, name: str, x: Tensor) -> Tensor:
    """A decoder layer of Llama's line."""
    config, tensors = checkpoint
    eps = config["rms_norm_eps"]
    x = x + attend_plainly(checkpoint, f"{name}.self_attn", normalise(tensors, f"{name}.input_layernorm", x, eps))
    return x + feed_forward(tensors, f"{name}.mlp", normalise(tensors, f"{name}.post_attention_layernorm", x, eps))


def fuse(checkpoint: Checkpoint, aux: Tensor) -> Tensor:
    """[T, H] the feature of each token. aux: [T, 3H] three layers of the target."""
    config, tensors = checkpoint
    if config.get("fc_norm"):
        parts = aux.chunk(3, -1)
        normed = [normalise(tensors, f"fc_norm.{i}", part, config["rms_norm_eps"]) for i, part in enumerate(parts)]
        aux = torch.cat(normed, dim=-1)
    return multiply(tensors, "fc", aux)


def step_eagle(checkpoint: Checkpoint, attention, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] the feature that is drafted at every pair of a feature and the token after it, and the state to score."""
    config, tensors = checkpoint
    eps = config["rms_norm_eps"]
    name = "layers.0"
    normed = normalise(tensors, f"{name}.hidden_norm", features, eps)
    x = torch.cat([normalise(tensors, f"{name}.input_layernorm", embedded, eps), normed], dim=-1)
    residual = features
    if config.get("norm_before_residual"):
        residual = normed
    x = residual + attention(checkpoint, f"{name}.self_attn", x)
    x = x + feed_forward(tensors, f"{name}.mlp", normalise(tensors, f"{name}.post_attention_layernorm", x, eps))
    state = normalise(tensors, "norm", x, eps)
    if config.get("norm_output"):
        return state, state
    return x, state


def step_first_eagle(checkpoint: Checkpoint, features: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
    """As `step_eagle`, by EAGLE-1 (2401.15077): `fc` of both, then a layer without a norm before its attention."""
    config, tensors = checkpoint
    x = multiply(tensors, "fc", torch.cat([embedded, features], dim=-1))
    x = x + attend_plainly(checkpoint, "layers.0.self_attn", x)
    normed = normalise(tensors, "layers.0.post_attention_layernorm", x, config["rms_norm_eps"])
    x = x + feed_forward(tensors, "layers.0.mlp", normed)
    return x, x


def step_mtp(checkpoint: Checkpoint, states: Tensor, embedded: Tensor, hidden_first: bool) -> tuple[Tensor, Tensor]:
    """As `step_eagle`, by an MTP layer. hidden_first: FastMTP's order of the two inputs; speculators has the other."""
    config, tensors = checkpoint
    eps = config["rms_norm_eps"]
    both = [
        normalise(tensors, "token_layernorm", embedded, eps),
        normalise(tensors, "hidden_layernorm", states, eps),
    ]
    if hidden_first:
        both.reverse()
    layer = Checkpoint(config, {f"layer.{name}": value for name, value in tensors.items()})
    x = run_layer(layer, "layer", multiply(tensors, "input_proj", torch.cat(both, dim=-1)))
    state = normalise(tensors, "final_layernorm", x, eps)
    return state, state


def draft_by_steps(step, features: Tensor, embedding: Tensor, following, path) -> Tensor:
    """[H] the state after a path. features: [T, H]; following: T tokens, each after its feature."""
    tokens = list(following)
    for token in (*path, None):
        drafted, states = step(features, embedding[tokens])
        features = torch.cat([features, drafted[-1:]])
        tokens.append(token)
    return states[-1]


def draft_eagle(checkpoint: Checkpoint, aux: Tensor, embedding: Tensor, following, path) -> Tensor:
    attention = attend_latently if "kv_lora_rank" in checkpoint.config else attend_plainly
    step = partial(step_eagle, checkpoint, attention)
    return draft_by_steps(step, fuse(checkpoint, aux), embedding, following, path)


def choose_candidates(checkpoint: Checkpoint, state: Tensor, count: int) -> Tensor:
    """EAGLE-4's [V] logits: the tokens that a low-rank output layer finds, scored by the whole one."""
    tensors = checkpoint.tensors
    found = multiply(tensors, "efficient_lm_head", multiply(tensors, "efficient_lm_head_down_proj", state))
    return keep_best(multiply(tensors, "lm_head", state), found, count)


def draft_pard(checkpoint: Checkpoint, text, mask: int, levels: int) -> Tensor:
    """[levels, V] a language model's logits at the last token of a text and at the masks behind it."""
    config, tensors = checkpoint
    x = tensors["model.embed_tokens.weight"].double()[[*text] + [mask] * (levels - 1)]
    for layer in range(config["num_hidden_layers"]):
        x = run_layer(checkpoint, f"model.layers.{layer}", x)
    return multiply(tensors, "lm_head", normalise(tensors, "model.norm", x[-levels:], config["rms_norm_eps"]))
