"""The decoder layer of the draft heads: Llama's, without options that heads do not use.

Keys and values go to a cache that is an argument: any object with
`update(keys, values) -> (keys, values)`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from treespec.files.atomic import Fields as Config

Attend = partial[Tensor]  # [B, T, in] -> [B, T, H]: a layer's attention at a step
Angles = Sequence[Tensor]  # cos and sin, as `Rotary` gives them
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


class KeyValues(Protocol):
    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]: ...


class Rotary(nn.Module):
    """Rotary position embedding with transformers' scaling rules.

    inv_freq: [R / 2] radians per position. R: the first entries of a head's D, which are rotated;
    all of them unless the config has `partial_rotary_factor`.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        partial_rotary: Any = PhiRotaryEmbedding  # Llama's knows no partial_rotary_factor
        rotary = partial_rotary(config)
        self.scale = float(rotary.attention_scaling)
        self.inv_freq = rotary.inv_freq.float()  # not a buffer: stays float32 when the head is cast
        self.known = torch.empty(2, 0, 0)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """[T] or [B, T] positions -> cos and sin, [1, T, R] or [B, 1, T, R], one for all heads.

        The first half of the angles is negative, so that `rotate` need not negate.
        """
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None, :, None] * self.inv_freq
        angles = torch.cat([-angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def get_table(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[2, size, R]: cos and sin of the first positions. Kept, and made again as texts grow."""
        known = self.known
        if (known.dtype, known.device) != (dtype, device) or known.shape[1] < size:
            positions = torch.arange(1 << size.bit_length(), device=device)
            cos, sin = self(positions, dtype)
            self.known = torch.cat([cos, sin])
        return self.known[:, :size]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R entries of [B, heads, T, D] by the angles of `Rotary`."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([rotate(x[..., :size], cos, sin), x[..., size:]], dim=-1)
    return x * cos + x.roll(size // 2, -1) * sin


class AttentionParts(NamedTuple):
    """What an attention computes of its inputs. C: positions of the context before them, if any.

    queries: [B, heads, T, D]. keys, values: [B, kv heads, C + T, D]; the values are not rotated.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Llama's attention, or Qwen3's, which norms each head's queries and keys.

    window: columns that a position attends to, its own included, counted back from it over the
    columns that the mask lets it see (`mask_last_seen`). None: all of these.
    """

    def __init__(
        self,
        config: LlamaConfig,
        in_features: int,
        *,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        heads = config.num_attention_heads
        size = config.head_dim
        kv_heads = config.num_key_value_heads
        assert size is not None  # LlamaConfig fills both in
        assert kv_heads is not None
        self.head_dim = size
        self.grouped = heads != kv_heads
        self.window = window
        self.q_proj = nn.Linear(in_features, heads * size, bias=qkv_bias)
        self.k_proj = nn.Linear(in_features, kv_heads * size, bias=qkv_bias)
        self.v_proj = nn.Linear(in_features, kv_heads * size, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        eps = config.rms_norm_eps
        self.q_norm = RMSNorm(size, eps=eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(size, eps=eps) if qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        mask: Tensor | None = None,
        cache: KeyValues | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """x, context, angles: as for `project`. Returns [B, T, H].

        mask: [T, P + C + T] or [B, 1, T, P + C + T] bool, None is causal.
        """
        q, k, v = self.project(x, angles, context)
        if cache is not None:
            k, v = cache.update(k, v)
        if self.window is not None:
            if mask is None:
                mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            mask = self.apply_window(mask)
        causal = mask is None
        return self.extend(
            F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=self.grouped)
        )

    def apply_window(self, mask: Tensor) -> Tensor:
        """What rows attend to of the columns that a mask [..., T, columns] lets them see."""
        if self.window is None:
            return mask
        return mask_last_seen(mask, self.window)

    def project(self, x: Tensor, angles: Angles, context: Tensor | None = None) -> AttentionParts:
        """Compute queries, keys and values of T positions, and rotate queries and keys.

        Args:
            x: [B, T, in].
            angles: cos and sin of all C + T positions, as `Rotary` gives them.
            context: [B, C, in] positions before these, of which keys and values are computed, and
                no queries.
        """
        # 1. The projections, [B, T, heads, D].
        both = x
        if context is not None:
            both = torch.cat([context, x], dim=1)
        q = self.q_norm(self.split_heads(self.q_proj(x)))
        k = self.k_norm(self.split_heads(self.k_proj(both)))
        v = self.split_heads(self.v_proj(both)).transpose(1, 2)

        # 2. Their rotation. Without a context queries and keys have the same positions: one call for both.
        cos, sin = angles
        if context is None:
            turned = rotate(torch.cat([q, k], dim=2).transpose(1, 2), cos, sin)
            q, k = turned.split([q.shape[2], k.shape[2]], dim=1)
            return AttentionParts(q, k, v)
        size = context.shape[1]
        q = rotate(q.transpose(1, 2), cos[:, :, size:], sin[:, :, size:])
        k = rotate(k.transpose(1, 2), cos, sin)
        return AttentionParts(q, k, v)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, heads · D] -> [B, T, heads, D]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def extend(self, out: Tensor) -> Tensor:
        """[B, heads, T, D] -> [B, T, H] the layer's output."""
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def mask_last_seen(seen: Tensor, window: int) -> Tensor:
    """Of the columns that each row sees, the last `window`. seen: [..., T, columns] bool.

    A row sees its path in the order of its positions: the sequence's pairs, then one node of each level
    of the tree. So the last columns that it sees are the last positions before it, whatever
    columns its siblings fill. A window of 3 over a sequence of two pairs and the levels {0, 1}, {2, 3}:

        columns        | pairs | level 1 | level 2 |
        node 3 sees    |  x x  |   . x   |   . x   |     its parent is node 1
        in the window  |  . x  |   . x   |   . x   |
    """
    to_its_right = seen.flip(-1).cumsum(-1).flip(-1)  # seen columns from each on, itself included
    return seen & (to_its_right <= window)


class RMSNorm(nn.RMSNorm):
    """In the dtype of its input, where autocast would mix two and leave the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerInputs(NamedTuple):
    """attended: [B, T, inputs * H] what the attention takes. residual: [B, T, H] what its output is added to."""

    attended: Tensor
    residual: Tensor


class Layer(nn.Module):
    """Llama's layer, or Qwen3's: a norm before the attention and one before the MLP.

    inputs: width of the attention's input, in H. normed: false in EAGLE's, whose attention has no
    norm before it. qkv_bias, qk_norm, window: as for `Attention`.
    """

    def __init__(
        self, config: LlamaConfig, *, inputs: int = 1, normed: bool = True, **attention: Any
    ) -> None:
        super().__init__()
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps=eps) if normed else nn.Identity()
        self.self_attn = Attention(config, inputs * width, **attention)
        self.post_attention_layernorm = RMSNorm(width, eps=eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        """[B, T, inputs * H] -> [B, T, H]. attend: `self_attn` at given positions, with mask and cache."""
        inputs = self.split_inputs(x)
        x = inputs.residual + attend(inputs.attended)
        return x + self.mlp(self.post_attention_layernorm(x))

    def split_inputs(self, x: Tensor) -> LayerInputs:
        """Norm the attention's input; the residual is not normed."""
        return LayerInputs(self.input_layernorm(x), residual=x)


@final
class Eagle3Layer(Layer):
    """EAGLE-3's first: over normed embedding and normed feature; the raw feature is the residual.

    norm_before_residual: the normed feature is the residual, as in some of speculators' heads.
    """

    def __init__(
        self, config: LlamaConfig, *, norm_before_residual: bool = False, **attention: Any
    ) -> None:
        super().__init__(config, inputs=2, **attention)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def split_inputs(self, x: Tensor) -> LayerInputs:
        """Norm embedding and feature, each by a norm of its own; the residual is the feature.

        x: [B, T, 2 H] embeddings and features side by side.
        """
        embeddings, features = x.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        if self.norm_before_residual:
            return LayerInputs(both, residual=normed)
        return LayerInputs(both, residual=features)


def list_layer_windows(config: Config) -> list[int | None]:
    """For each layer the positions that it sees, its own included; None: all before it.

    Raises ValueError for layer types that no EAGLE-3 head has, and for a window that is missing.
    """
    layers = config.get("num_hidden_layers", 1)
    window = config.get("sliding_window")
    if not isinstance(layers, int) or layers < 1:
        raise ValueError(f"num_hidden_layers is {layers!r}, must be at least 1")
    types: Sequence[str] = config.get("layer_types") or [FULL_ATTENTION] * layers
    windows: dict[str, int | None] = {FULL_ATTENTION: None}
    if isinstance(window, int) and window > 0:
        windows[SLIDING_ATTENTION] = window
    if len(types) != layers or not windows.keys() >= set(types):
        raise ValueError(
            f"layer_types is {types}, must be {FULL_ATTENTION} or {SLIDING_ATTENTION} for each of {layers} layers, and "
            f"sliding_window is {window!r}"
        )
    return [windows[kind] for kind in types]
