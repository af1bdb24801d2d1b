"""Attention of drafts that start at every position of a text at once, step after step: for training.

Step 0 is causal over the pairs of the text. Later, row t sees the pairs 0 to t, which are the target's, and of each
step after them its own entry alone, which it drafted itself (Li et al. 2025, 2503.01840, section 3.2). Five rows at
step 2; two have left, as the text has no token for them any more:

             step 0      step 1      step 2
    row 0    x . . . .   x . . . .   x . .
    row 1    x x . . .   . x . . .   . x .
    row 2    x x x . .   . . x . .   . . x

So a later step adds one score to each row that it leaves, and no mask of all rows by all columns. The first columns are
scored in blocks of rows, which the backward pass computes again: what is kept grows with rows times steps.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treespec.heads.layers import Attention

ROWS = 256  # of a block


@final
class UnrolledAttention:
    """`attention` over the steps so far; every call is the next one, over the same rows or the first of them."""

    def __init__(self, attention: Attention, rows: int = ROWS) -> None:
        """rows: of a block."""
        self.attention, self.rows = attention, rows
        self.known: list[tuple[Tensor, Tensor]] = []  # of each step keys and values, [B, kv heads, R, D]

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x: [B, R, in]. angles: of `Rotary`, at the rows' positions of this step. Returns [B, R, H]."""
        q, k, v = self.attention.project(x, angles)
        self.known.append((k, v))
        if len(self.known) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.attention.grouped)
        else:
            blocks = range(0, q.shape[2], self.rows)
            out = torch.cat([self._block(q, first, min(first + self.rows, q.shape[2])) for first in blocks], dim=2)
        return self.attention.o_proj(out.transpose(1, 2).flatten(-2))

    def _block(self, q: Tensor, first: int, end: int) -> Tensor:
        (keys, values), *later = self.known
        own = [(k[:, :, first:end], v[:, :, first:end]) for k, v in later]
        given = q[:, :, first:end], keys[:, :, :end], values[:, :, :end], own
        return checkpoint(attend_rows, *given, use_reentrant=False, preserve_rng_state=False)


def attend_rows(q: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The last R of E rows: causal over the first columns, with a column of their own for each later step.

    q: [B, heads, R, D]. keys, values: [B, kv heads, E, D]. own: keys and values [B, kv heads, R, D] of each later step.
    Returns [B, heads, R, D]. Scores and their softmax are in float32.
    """
    rows, columns = q.shape[2], keys.shape[2]
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [B, kv, heads / kv, R, D]
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)).float()  # [B, kv, heads / kv, R, E]
    unseen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    alone = [(grouped.float() * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
    scores = torch.cat([scores.masked_fill(unseen, -torch.inf), *alone], dim=-1) * q.shape[-1] ** -0.5
    weights = scores.softmax(-1).to(values.dtype)
    out = weights[..., :columns] @ values[:, :, None]
    for column, (_, v) in enumerate(own, start=columns):
        out = out + weights[..., column, None] * v[:, :, None]
    return out.flatten(1, 2)
