"""Attention for training, where drafts start at every position of a sequence at once.

Step 0 is causal over the pairs of the sequence, whose features are the target's. At a later step, row t
sees pairs 0 to t. Of every step since step 0 it sees only its own entry, whose feature the head
drafted (Li et al. 2025, 2503.01840, section 3.2). Five rows at step 2; rows 3 and 4 have left,
because the sequence has no further token for them:

             step 0      step 1      step 2
    row 0    x . . . .   x . . . .   x . .
    row 1    x x . . .   . x . . .   . x .
    row 2    x x x . .   . . x . .   . . x

A mask of that shape would take attention over all steps' columns, most of them masked: memory that
grows with the square of the rows, for each step. Here is how one causal attention does it.

**The idea.** Row t's own columns differ from row to row, but there is one a step. Write q for the row's
query, k_i and v_i for the pairs, and k'_j and v'_j for its own column of step j = 1 … s:

    a_j = q · k'_j                                          the own columns' scores: one number each
    out = (sum_i exp(q · k_i) v_i + sum_j exp(a_j) v'_j) / Z,    Z = sum_i exp(q · k_i) + sum_j exp(a_j)
        = sum_i w_i v_i + sum_j w'_j v'_j                   with the weights w_i and w'_j, which sum to 1

The numbers a_j are cheap: R products a step. So the attention need not see k'_j; it must see a_j, and tell
w'_j. Queries, keys and values get a channel more for each own column, and there is a *score column* a step
which all rows share:

                   D channels    channel D + j
    query of row t      q            a_j                    the row brings its score along
    key of pair i       k_i          0                      q · k_i, as without the channel
    key of column j     0            1                      selects a_j: the score of the own column
    value of pair i     v_i          0
    value of column j   0            1                      the output's channel D + j is the weight w'_j

The scores of that attention are q · k_i and a_j, so its weights are w_i and w'_j. Its first D channels are
sum_i w_i v_i, and the others are w'_j, by which the own values are added afterwards. Step 1 of three rows:

    queries     0        q0 a0    q1 a1    q2 a2     the zeros shift the others down: row t sees t + 2 columns
    keys        0  1     k0 0     k1 0     k2 0
    values      0  1     v0 0     v1 0     v2 0
    row 2       w0 v0 + w1 v1 + w2 v2, w'            to which w' times the own value is added

The score columns stand before the pairs. With as many rows of zeros before the queries, row t sees them
and the pairs 0 to t: that is a causal attention, which torch's fused kernels have. The backward pass
keeps what grows with the rows, not with their square.

**Precision.** A score in bfloat16 would be rounded to 8 bits, where the kernel has q · k_i in float32. So a_j
goes in two channels, its rounding and the remainder, and the key of a score column has a 1 in both.

**Windows.** With a sliding window, row t at step s sees the window's last positions up to its own, t + s. So
each step takes its own column in and lets the oldest pair go. In the first drawing, with a window of
3, row 2 sees the pairs 1 and 2 at step 1, next to its own column, and pair 2 at step 2, next to its
own two. A window takes a mask of all rows by all columns.
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.heads.layers import Angles, Attention


class AttentionColumns(NamedTuple):
    """Keys and values [B, kv heads, R, D] of R columns."""

    keys: Tensor
    values: Tensor

    def take_first(self, rows: int) -> "AttentionColumns":
        """The first `rows` columns."""
        return AttentionColumns(self.keys[:, :, :rows], self.values[:, :, :rows])


@final
class UnrolledAttention:
    """Attention over all steps so far. Each call is the next step, on the same rows or fewer.

    The window is the attention's own.
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.steps: list[AttentionColumns] = []

    def __call__(self, x: Tensor, angles: Angles) -> Tensor:
        """x: [B, R, in] -> [B, R, H]. angles: of `Rotary`, at the rows' positions of this step."""
        parts = self.attention.project(x, angles)
        self.steps.append(AttentionColumns(parts.keys, parts.values))
        return self.attention.extend(attend(parts.queries, self.steps, self.attention.window))


def attend(queries: Tensor, steps: Sequence[AttentionColumns], window: int | None = None) -> Tensor:
    """Attend to the columns of step 0 causally, and to a row's own column of each later step.

    Args:
        queries: [B, heads, R, D] of the latest step.
        steps: the columns of each step so far, of R rows or more.
        window: the positions that a row sees, its own included; None: all.

    Returns [B, heads, R, D].
    """
    # 1. The columns of step 0, and the own ones that the window still holds.
    rows, size = queries.shape[2:]
    pairs = steps[0].take_first(rows)
    later = steps[1:]
    if window is not None:
        later = later[-window:]
    own = [columns.take_first(rows) for columns in later]
    count = len(own)

    # 2. Own scores as further channels of the queries, and a column for each that selects it.
    scores = score_own_columns(queries, own)
    extended = add_score_channels(queries, scores)
    unit = torch.eye(count, dtype=queries.dtype, device=queries.device)
    selects = torch.cat([unit, unit], 1)  # [count, 2 count]: a score's two parts are added
    tells = F.pad(unit, (0, count))  # [count, 2 count]: the weight goes into one channel
    keys = prepend_columns(selects, pairs.keys)
    values = prepend_columns(tells, pairs.values)

    # 3. One attention, whose first `count` rows are zeros and fall away.
    mask = None
    if window is not None:
        mask = build_window_mask(rows, count, window, queries.device)
    out = F.scaled_dot_product_attention(
        F.pad(extended, (0, 0, count, 0)),
        keys,
        values,
        mask,
        is_causal=mask is None,
        scale=size**-0.5,
        enable_gqa=queries.shape[1] > keys.shape[1],
    )[:, :, count:]

    # 4. The own values by their weights. Heads that share keys and values stand in groups.
    groups = (keys.shape[1], -1)
    total = out[..., :size].unflatten(1, groups)  # [B, kv heads, group, R, D]
    weights = out[..., size:].unflatten(1, groups)
    for number, columns in enumerate(own):
        weight = weights[..., number, None]  # [B, kv heads, group, R, 1]
        total = total + weight * columns.values[:, :, None]
    return total.flatten(1, 2)


def score_own_columns(queries: Tensor, own: Sequence[AttentionColumns]) -> list[Tensor]:
    """The scores a_j [B, heads, R] in float32 of each row's own column, for each later step."""
    scores: list[Tensor] = []
    if not own:
        return scores
    grouped = queries.unflatten(1, (own[0].keys.shape[1], -1))  # [B, kv heads, group, R, D]
    for columns in own:
        products = grouped.float() * columns.keys[:, :, None]
        scores.append(products.sum(-1).flatten(1, 2))
    return scores


def add_score_channels(queries: Tensor, scores: Sequence[Tensor]) -> Tensor:
    """[B, heads, R, D] queries -> [B, heads, R, D + 2 count]: the scores follow, in two parts.

    The parts are the scores' roundings to bfloat16, and what the roundings lose.
    """
    rounded = [score.bfloat16().float() for score in scores]
    channels = [queries]
    for part in rounded:
        channels.append(part[..., None].to(queries.dtype))
    for score, part in zip(scores, rounded, strict=True):
        channels.append((score - part)[..., None].to(queries.dtype))
    return torch.cat(channels, dim=-1)


def prepend_columns(score_columns: Tensor, pairs: Tensor) -> Tensor:
    """Put the score columns before the keys, or the values, of the pairs.

    Args:
        score_columns: [count, 2 count] their further channels; the first D are zeros.
        pairs: [B, kv heads, R, D], whose further channels are zeros.

    Returns [B, kv heads, count + R, D + 2 count].
    """
    texts, heads, _, size = pairs.shape
    before = F.pad(score_columns, (size, 0)).expand(texts, heads, -1, -1)
    return torch.cat([before, F.pad(pairs, (0, score_columns.shape[1]))], dim=2)


def build_window_mask(rows: int, count: int, window: int, device: torch.device) -> Tensor:
    """[count + rows, count + rows] bool: all score columns, and the window's last pairs without them.

    With a window of three and one own column, rows 1 to 3 see:

        own | x x . .
        own | . x x .
        own | . . x x
    """
    band = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    return F.pad(band.triu(count + 1 - window), (count, 0, count, 0), value=True)
