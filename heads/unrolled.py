"""Attention for training, where drafts start at every position of a sequence at once.

Step 0 is causal over the pairs of the sequence, whose features are the target's. At a later step, row t
sees pairs 0 to t. Of every step since step 0 it sees only its own entry, whose feature the head
drafted (Li et al. 2025, 2503.01840, section 3.2). Five rows at step 2; rows 3 and 4 have left,
because the sequence has no further token for them:

             step 0      step 1      step 2
    row 0    x . . . .   x . . . .   x . .
    row 1    x x . . .   . x . . .   . x .
    row 2    x x x . .   . . x . .   . . x

A later step therefore adds one score per row, and needs no mask of all rows by all columns. The
columns of step 0 are scored in blocks of rows. The backward pass computes each block again, so
memory grows with rows times steps, not with rows squared.

With a sliding window, row t at step s sees the window's last positions up to its own, t + s. So
each step takes its own column in and lets the oldest pair go. Above, with a window of 3, row 2 sees
the pairs 1 and 2 at step 1, next to its own column, and pair 2 at step 2, next to its own two.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from treespec.heads.layers import Angles, Attention

ROWS = 256  # per block


@final
class UnrolledAttention:
    """Attention over all steps so far. Each call is the next step, on the same rows or fewer.

    The window is the attention's own.
    """

    def __init__(self, attention: Attention, rows: int = ROWS) -> None:
        """rows: rows per block, default 256; fewer take less memory."""
        self.attention, self.rows = attention, rows
        self.steps: list[tuple[Tensor, Tensor]] = []  # keys and values by step, [B, kv heads, R, D]

    def __call__(self, x: Tensor, angles: Angles) -> Tensor:
        """x: [B, R, in] -> [B, R, H]. angles: of `Rotary`, at the rows' positions of this step."""
        q, k, v = self.attention.project(x, angles)
        self.steps.append((k, v))
        if len(self.steps) == 1 and self.attention.window is None:
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.attention.grouped
            )
        else:
            blocks = range(0, q.shape[2], self.rows)
            out = torch.cat(
                [self._block(q, first, min(first + self.rows, q.shape[2])) for first in blocks],
                dim=2,
            )
        return self.attention.joined(out)

    def _block(self, q: Tensor, first: int, end: int) -> Tensor:
        (keys, values), *later = self.steps
        window = self.attention.window or keys.shape[2] + len(later)
        pairs = max(window - len(later), 0)  # of the window, next to the row's own columns
        oldest = min(max(first + 1 - pairs, 0), first)
        later = later[-window:]
        own_columns = [(k[:, :, first:end], v[:, :, first:end]) for k, v in later]
        columns = keys[:, :, oldest:end], values[:, :, oldest:end]
        block = q[:, :, first:end], *columns, own_columns, pairs
        return checkpoint(attend_rows, *block, use_reentrant=False, preserve_rng_state=False)


def attend_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    own: list[tuple[Tensor, Tensor]],
    pairs: int,
) -> Tensor:
    """The last R of E rows: causal over step 0, plus one own column for each later step.

    q: [B, heads, R, D]. keys, values: [B, kv heads, E, D] of step 0. own: keys and values
    [B, kv heads, R, D] for each later step. pairs: columns of step 0 that a row sees, the last one
    its own. 0 needs an own column.
    Returns [B, heads, R, D]. Scores and their softmax are in float32.
    """
    rows, columns = q.shape[2], keys.shape[2]
    grouped = q.unflatten(1, (keys.shape[1], -1))  # [B, kv, heads / kv, R, D]
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)).float()  # [B, kv, heads / kv, R, E]
    unseen = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    unseen |= torch.ones_like(unseen).tril(columns - rows - pairs)
    alone = [(grouped.float() * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
    scores = (
        torch.cat([scores.masked_fill(unseen, -torch.inf), *alone], dim=-1) * q.shape[-1] ** -0.5
    )
    weights = scores.softmax(-1).to(values.dtype)
    out = weights[..., :columns] @ values[:, :, None]
    for column, (_, v) in enumerate(own, start=columns):
        out = out + weights[..., column, None] * v[:, :, None]
    return out.flatten(1, 2)
