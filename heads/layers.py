"""The decoder layer of the draft heads: Llama's, without options that heads do not use.

The caller passes the cache: any object with `update(keys, values) -> (keys, values)`.
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
Angles = Sequence[Tensor]  # cos and sin, as `Rotary` returns them
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


class KeyValues(Protocol):
    """The cache of one attention layer."""

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, kv heads, T, D]; return those of all P + T columns."""
        ...


class Rotary(nn.Module):
    """Rotary position embedding with transformers' scaling rules.

    Attributes:
        inv_freq: [R / 2] radians per position. The first R of an attention head's D entries are rotated:
            all of them unless the config has `partial_rotary_factor`.
        scale: factor on cos and sin; 1 unless the scaling rule has one.
        known: [2, size, R] the table of `get_table` so far.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        partial_rotary: Any = PhiRotaryEmbedding  # Llama's class has no partial_rotary_factor
        rotary = partial_rotary(config)
        self.scale = float(rotary.attention_scaling)
        self.inv_freq = rotary.inv_freq.float()  # not a buffer: stays float32 when the head is cast
        self.known = torch.empty(2, 0, 0, dtype=torch.float32, device="cpu")

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Angles:
        """Turn [T] or [B, T] positions into cos and sin, [1, T, R] or [B, 1, T, R], equal for all heads.

        The first half of the angles is negative, so that `rotate` need not negate.
        """
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions[..., None, :, None] * self.inv_freq
        angles = torch.cat([-angles, angles], dim=-1)
        return (angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype)

    def get_table(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[2, size, R]: cos and sin of the first `size` positions, from a table that grows with the sequences."""
        table = self.known
        if (table.dtype, table.device) != (dtype, device) or table.shape[1] < size:
            positions = torch.arange(1 << size.bit_length(), device=device)
            cos, sin = self(positions, dtype)
            self.known = torch.cat([cos, sin])
        return self.known[:, :size]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R entries of [B, heads, T, D] by the angles of `Rotary`."""
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat([rotate(x[..., :size], cos, sin), x[..., size:]], dim=-1)
    return x * cos + x.roll(size // 2, -1) * sin


class AttentionParts(NamedTuple):
    """Queries, keys and values of an attention's inputs, after a context of C positions, if there is one.

    Attributes:
        queries: [B, heads, T, D] rotated.
        keys: [B, kv heads, C + T, D] rotated.
        values: [B, kv heads, C + T, D].
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Llama's attention, or Qwen3's, which norms each attention head's queries and keys.

    Args:
        config: Llama's fields.
        in_features: width of the input.
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether queries and keys are normed, as in Qwen3.
        window: the number of columns that a position attends to, its own included: the last of those
            that the mask lets it see (`mask_last_seen`). None: all of those.
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
        """Attend to P cached columns, C columns of context and the T inputs themselves.

        Args:
            x: [B, T, in] the inputs.
            angles: cos and sin of all C + T positions.
            mask: [T, P + C + T] or [B, 1, T, P + C + T] bool, the columns that each row sees; None is causal.
            cache: keys and values of the P earlier columns; None: there are none.
            context: [B, C, in] as for `project`.

        Returns:
            [B, T, H].
        """
        q, k, v = self.project(x, angles, context)
        if cache is not None:
            k, v = cache.update(k, v)
        if self.window is not None and k.shape[2] > self.window:
            if mask is None:
                mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            mask = self.apply_window(mask)
        causal = mask is None
        return self.extend(
            F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=self.grouped)
        )

    def apply_window(self, mask: Tensor) -> Tensor:
        """Restrict a mask [..., T, columns] to the window: the last `window` columns that each row sees."""
        if self.window is None or mask.shape[-1] <= self.window:
            return mask
        return mask_last_seen(mask, self.window)

    def project(self, x: Tensor, angles: Angles, context: Tensor | None = None) -> AttentionParts:
        """Compute queries, keys and values of T positions, and rotate queries and keys.

        Args:
            x: [B, T, in].
            angles: cos and sin of all C + T positions, as `Rotary` returns them.
            context: [B, C, in] inputs at the C positions before x. They get keys and values, but no
                queries.
        """
        # 1. The projections, [B, T, heads, D].
        context_and_x = x
        if context is not None:
            context_and_x = torch.cat([context, x], dim=1)
        q = self.q_norm(self.split_heads(self.q_proj(x)))
        k = self.k_norm(self.split_heads(self.k_proj(context_and_x)))
        v = self.split_heads(self.v_proj(context_and_x)).transpose(1, 2)

        # 2. Their rotation. Without a context queries and keys have the same positions: one call for both.
        cos, sin = angles
        if context is None:
            rotated = rotate(torch.cat([q, k], dim=2).transpose(1, 2), cos, sin)
            q, k = rotated.split([q.shape[2], k.shape[2]], dim=1)
            return AttentionParts(q, k, v)
        size = context.shape[1]
        q = rotate(q.transpose(1, 2), cos[:, :, size:], sin[:, :, size:])
        k = rotate(k.transpose(1, 2), cos, sin)
        return AttentionParts(q, k, v)

    def split_heads(self, x: Tensor) -> Tensor:
        """[B, T, heads · D] -> [B, T, heads, D]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def extend(self, out: Tensor) -> Tensor:
        """[B, heads, T, D] outputs of the attention heads -> [B, T, H] through `o_proj`."""
        return self.o_proj(out.transpose(1, 2).flatten(-2))


def mask_last_seen(seen: Tensor, window: int) -> Tensor:
    """Keep only the last `window` columns that each row sees. seen: [..., T, columns] bool.

    A row sees its path in the order of positions: the sequence's pairs, then one node of each level
    of the tree. So the last columns that it sees are the last positions up to its own; columns of
    siblings do not count. A window of 3 over a sequence of two pairs and the levels {0, 1}, {2, 3}:

        columns        | pairs | level 1 | level 2 |
        node 3 sees    |  x x  |   . x   |   . x   |     its parent is node 1
        in the window  |  . x  |   . x   |   . x   |
    """
    numbers = seen.cumsum(-1, dtype=torch.int32)  # the first column that a row sees has number 1
    return seen & (numbers > numbers[..., -1:] - window)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, computed in the dtype of its input: under autocast two dtypes would miss the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class LayerInputs(NamedTuple):
    """The two inputs of a layer.

    Attributes:
        attended: [B, T, inputs * H] the attention's input.
        residual: [B, T, H] the attention's output is added to it.
    """

    attended: Tensor
    residual: Tensor


class Layer(nn.Module):
    """Llama's layer, or Qwen3's: a norm before the attention and one before the MLP.

    Args:
        config: Llama's fields.
        inputs: width of the attention's input, as a multiple of H.
        normed: whether a norm stands before the attention; EAGLE-1's layer has none.
        attention: qkv_bias, qk_norm and window, as for `Attention`.
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
        """[B, T, inputs * H] -> [B, T, H]. attend: `self_attn` with angles, mask and cache bound."""
        inputs = self.split_inputs(x)
        x = inputs.residual + attend(inputs.attended)
        return x + self.mlp(self.post_attention_layernorm(x))

    def split_inputs(self, x: Tensor) -> LayerInputs:
        """Norm the attention's input; the residual is not normed."""
        return LayerInputs(self.input_layernorm(x), residual=x)


@final
class Eagle3Layer(Layer):
    """EAGLE-3's first layer: it attends over normed embedding and normed feature; the residual is the raw feature.

    norm_before_residual: whether the residual is the normed feature, as in some of speculators' heads.
    """

    def __init__(
        self, config: LlamaConfig, *, norm_before_residual: bool = False, **attention: Any
    ) -> None:
        super().__init__(config, inputs=2, **attention)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def split_inputs(self, x: Tensor) -> LayerInputs:
        """Norm the embedding and the feature separately; the residual is the feature.

        x: [B, T, 2 H] embeddings and features side by side.
        """
        embeddings, features = x.chunk(2, dim=-1)
        normed = self.hidden_norm(features)
        attended = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        if self.norm_before_residual:
            return LayerInputs(attended, residual=normed)
        return LayerInputs(attended, residual=features)


def list_layer_windows(config: Config) -> list[int | None]:
    """The window of each layer: the number of positions that a row sees, its own included; None: all.

    Raises ValueError for other layer types than full and sliding attention, and for a missing window.
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
