"""Attention for training, where drafts start at every position of a sequence at once.

Step 0 is causal over the pairs of the sequence, whose features are the target's. At a later step, row t
sees pairs 0 to t. Of every step since step 0 it sees only its own entry, whose feature the head
drafted (Li et al. 2025, 2503.01840, section 3.2). Five rows at step 2; rows 3 and 4 have left,
because the sequence has no further token for them:

             step 0      step 1      step 2
    row 0    x . . . .   x . . . .   x . .
    row 1    x x . . .   . x . . .   . x .
    row 2    x x x . .   . . x . .   . . x

A later step adds one score per row: the own column's. It goes into a column that all rows see, before
the columns of step 0, whose key is a unit vector: it finds the score among numbers that the queries
carry behind their own. Its value is a unit vector, too, so the column's weight comes out behind the
attention's own numbers. The whole is one causal attention by torch's fused kernels, and the backward
pass keeps what grows with the rows, not with their square. Step 1, with scores s and weights w:

    queries     0        q0 s0    q1 s1    q2 s2     the zeros shift the others down: row t sees t + 2 columns
    keys        0  1     k0 0     k1 0     k2 0
    values      0  1     v0 0     v1 0     v2 0
    row 2       a v0 + b v1 + c v2, w                to which w times the own value is added

With a sliding window, row t at step s sees the window's last positions up to its own, t + s. So
each step takes its own column in and lets the oldest pair go. In the first drawing, with a window of
3, row 2 sees the pairs 1 and 2 at step 1, next to its own column, and pair 2 at step 2, next to its
own two. A window takes a mask of all rows by all columns.
"""

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.heads.layers import Angles, Attention


@final
class UnrolledAttention:
    """Attention over all steps so far. Each call is the next step, on the same rows or fewer.

    The window is the attention's own.
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.steps: list[tuple[Tensor, Tensor]] = []  # keys and values by step, [B, kv heads, R, D]

    def __call__(self, x: Tensor, angles: Angles) -> Tensor:
        """x: [B, R, in] -> [B, R, H]. angles: of `Rotary`, at the rows' positions of this step."""
        q, k, v = self.attention.project(x, angles)
        self.steps.append((k, v))
        return self.attention.extend(attend(q, self.steps, self.attention.window))


def attend(q: Tensor, steps: list[tuple[Tensor, Tensor]], window: int | None = None) -> Tensor:
    """Causal attention over the columns of step 0, and over a row's own column of each later step.

    q: [B, heads, R, D]. steps: keys and values [B, kv heads, R or more, D] by step. window: the
    positions that a row sees, its own included. Returns [B, heads, R, D].
    """
    # 1. Step 0, and the own columns as [B, kv heads, 1, R, D] beside the grouped queries.
    rows, size = q.shape[2:]
    (keys, values), *later = [[part[:, :, :rows] for part in step] for step in steps]
    own = [[part[:, :, None] for part in step] for step in later[-(window or len(steps)) :]]
    grouped = q.unflatten(1, (keys.shape[1], -1))
    count = len(own)

    # 2. Scores of the own columns, behind the queries in two parts: bfloat16 would round one.
    scores = [(grouped.float() * k).sum(-1).flatten(1, 2) for k, _ in own]  # [B, heads, R]
    high = [score.bfloat16().float() for score in scores]
    parts = [*high, *(score - near for score, near in zip(scores, high, strict=True))]
    wide = torch.cat([q, *(part[..., None].to(q.dtype) for part in parts)], dim=-1)

    # 3. Columns of unit vectors, which find the scores and carry the weights.
    unit = torch.eye(count, dtype=q.dtype, device=q.device)
    found = torch.cat([unit, unit], 1)
    carried = F.pad(unit, (0, count))
    keys, values = (
        torch.cat(
            [
                F.pad(column, (size, 0)).expand(*part.shape[:2], -1, -1),
                F.pad(part, (0, 2 * count)),
            ],
            dim=2,
        )
        for part, column in ((keys, found), (values, carried))
    )

    # 4. One attention. With a window of three and one own column, rows 1 to 3 see: own | x x . .
    #    own | . x x . and own | . . x x
    mask = None
    if window is not None:
        band = torch.ones(rows, rows, dtype=torch.bool, device=q.device).tril()
        mask = F.pad(band.triu(count + 1 - window), (count, 0, count, 0), value=True)
    out = F.scaled_dot_product_attention(
        F.pad(wide, (0, 0, count, 0)),
        keys,
        values,
        mask,
        is_causal=mask is None,
        scale=size**-0.5,
        enable_gqa=grouped.shape[2] > 1,
    )[:, :, count:]

    # 5. The own values by their weights.
    total = out[..., :size].unflatten(1, grouped.shape[1:3])
    weights = out[..., size:].unflatten(1, grouped.shape[1:3])
    for column, (_, v) in enumerate(own):
        total = total + weights[..., column, None] * v
    return total.flatten(1, 2)
