"""Attention for training: drafts start at every position of a sequence at once.

Step 0 is causal over the pairs of the sequence, whose features are the target's. At a later step, row t
sees pairs 0 to t. Of the later steps it sees only column t, the features that the head drafted from row t
(Li et al. 2025, 2503.01840, section 3.2). Five rows at step 2; rows 3 and 4 have ended, because the
sequence has no further token for them:

             step 0      step 1      step 2
    row 0    x . . . .   x . . . .   x . .
    row 1    x x . . .   . x . . .   . x .
    row 2    x x x . .   . . x . .   . . x

A mask of that shape needs attention over all steps' columns, most of them masked: its memory grows with
the square of the rows, for each step. One causal attention computes the same as follows.

**The idea.** Row t has one own column in each later step. Write q for the row's query, k_i and v_i for
the pairs, and k'_j and v'_j for the own column of step j = 1 … s:

    a_j = q · k'_j                                          the own columns' scores: one number each
    out = (sum_i exp(q · k_i) v_i + sum_j exp(a_j) v'_j) / Z,    Z = sum_i exp(q · k_i) + sum_j exp(a_j)
        = sum_i w_i v_i + sum_j w'_j v'_j                   with the weights w_i and w'_j, which sum to 1

The numbers a_j are cheap: R dot products a step. So the attention does not need k'_j: it needs a_j as input,
and must output w'_j. Queries, keys and values get one more channel for each own column, and each later step
adds one *score column*, the same for all rows:

                   D channels    channel D + j
    query of row t      q            a_j                    the row's own score
    key of pair i       k_i          0                      q · k_i, as without the channel
    key of column j     0            1                      selects a_j: the score of the own column
    value of pair i     v_i          0
    value of column j   0            1                      the output's channel D + j is the weight w'_j

The scores of that attention are q · k_i and a_j, so its weights are w_i and w'_j. Its first D output channels
are sum_i w_i v_i, the others are w'_j. Afterwards the own values are added with these weights. Step 1 of three rows:

    queries     0        q0 a0    q1 a1    q2 a2     the zeros shift the others down: row t sees t + 2 columns
    keys        0  1     k0 0     k1 0     k2 0
    values      0  1     v0 0     v1 0     v2 0
    row 2       w0 v0 + w1 v1 + w2 v2, w'            then w' times the own value is added

The score columns come before the pairs. The same number of zero rows comes before the queries, so row t sees
all score columns and pairs 0 to t. This is a causal attention, for which torch has fused kernels. The memory
of the backward pass grows with the rows, not with their square.

**Precision.** The kernel has q · k_i in float32, but a_j in bfloat16 would have 8 bits. So a_j takes two
channels, its rounding and the remainder, and the key of a score column has a 1 in both.

**Windows.** With a sliding window, row t at step s sees the last `window` positions up to its own, t + s. So
each step adds an own column and removes the oldest pair. In the first drawing, with a window of 3, row 2
sees pairs 1 and 2 and its own column at step 1, and pair 2 and its two own columns at step 2. A window
needs a mask of all rows by all columns.
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
        """Take the first `rows` columns."""
        return AttentionColumns(self.keys[:, :, :rows], self.values[:, :, :rows])


@final
class UnrolledAttention:
    """Attention over all steps so far. Each call is the next step, on the same rows or fewer.

    It has the window of `attention`.
    """

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.steps: list[AttentionColumns] = []

    def __call__(self, x: Tensor, angles: Angles) -> Tensor:
        """Attend at the next step: x [B, R, in] -> [B, R, H]. angles: `Rotary`'s at the rows' positions."""
        parts = self.attention.project(x, angles)
        self.steps.append(AttentionColumns(parts.keys, parts.values))
        return self.attention.extend(attend(parts.queries, self.steps, self.attention.window))


def attend(queries: Tensor, steps: Sequence[AttentionColumns], window: int | None = None) -> Tensor:
    """Attend to the columns of step 0 causally, and to each row's own column of later steps.

    Args:
        queries: [B, heads, R, D] of the latest step.
        steps: the columns of each step so far, for R rows or more.
        window: the number of positions that a row sees, its own included; None: all.

    Returns:
        [B, heads, R, D].
    """
    # 1. The columns of step 0, and the own columns inside the window.
    rows, size = queries.shape[2:]
    pairs = steps[0].take_first(rows)
    later = steps[1:]
    if window is not None and rows + len(later) <= window:
        window = None  # it holds all that a row sees
    if window is not None:
        later = later[-window:]
    own_columns = [columns.take_first(rows) for columns in later]
    count = len(own_columns)

    # 2. Own scores as further channels of the queries, and a score column for each.
    extended = add_score_channels(queries, score_own_columns(queries, own_columns))
    columns = add_score_columns(pairs, count)

    # 3. One attention; its first `count` rows are zeros and are cut off.
    mask = None
    if window is not None:
        mask = build_window_mask(rows, count, window, queries.device)
    out = F.scaled_dot_product_attention(
        F.pad(extended, (0, 0, count, 0)),
        columns.keys,
        columns.values,
        mask,
        is_causal=mask is None,
        scale=size**-0.5,
        enable_gqa=queries.shape[1] > pairs.keys.shape[1],
    )[:, :, count:]
    return add_own_values(out, own_columns, size)


def add_own_values(out: Tensor, own_columns: Sequence[AttentionColumns], size: int) -> Tensor:
    """Add the own values with their weights: [B, heads, R, D + 2 count] -> [B, heads, R, D]. size: D.

    Query heads that share a kv head are a group.
    """
    if not own_columns:
        return out
    grouped = out.unflatten(1, (own_columns[0].keys.shape[1], -1))
    total = grouped[..., :size]  # [B, kv heads, group, R, D]
    for number, columns in enumerate(own_columns):
        weight = grouped[..., size + number, None]  # [B, kv heads, group, R, 1]
        total = total + weight * columns.values[:, :, None]
    return total.flatten(1, 2)


def add_score_columns(pairs: AttentionColumns, count: int) -> AttentionColumns:
    """Put `count` score columns before the pairs, with two channels for the scores of each."""
    unit = torch.eye(count, dtype=pairs.keys.dtype, device=pairs.keys.device)
    score_channels = torch.cat([unit, unit], 1)  # [count, 2 count]: a score's two parts are added
    weight_channels = F.pad(unit, (0, count))  # [count, 2 count]: the weight goes into one channel
    return AttentionColumns(
        prepend_columns(score_channels, pairs.keys), prepend_columns(weight_channels, pairs.values)
    )


def score_own_columns(queries: Tensor, own_columns: Sequence[AttentionColumns]) -> list[Tensor]:
    """Compute the scores a_j [B, heads, R] of each row's own column in float32, for each later step."""
    scores: list[Tensor] = []
    if not own_columns:
        return scores
    grouped = queries.unflatten(1, (own_columns[0].keys.shape[1], -1))  # [B, kv heads, group, R, D]
    for columns in own_columns:
        products = grouped.float() * columns.keys[:, :, None]
        scores.append(products.sum(-1).flatten(1, 2))
    return scores


def add_score_channels(queries: Tensor, scores: Sequence[Tensor]) -> Tensor:
    """Append the scores to the queries as channels: [B, heads, R, D] -> [B, heads, R, D + 2 count].

    Each score has two channels: its rounding to bfloat16, and the remainder.
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
        score_columns: [count, 2 count] the last channels of the score columns; their first D are zeros.
        pairs: [B, kv heads, R, D] keys or values; their last 2 count channels become zeros.

    Returns:
        [B, kv heads, count + R, D + 2 count].
    """
    texts, heads, _, size = pairs.shape
    leading_columns = F.pad(score_columns, (size, 0)).expand(texts, heads, -1, -1)
    return torch.cat([leading_columns, F.pad(pairs, (0, score_columns.shape[1]))], dim=2)


def build_window_mask(rows: int, count: int, window: int, device: torch.device) -> Tensor:
    """Build the mask [count + rows, count + rows]: all score columns, and the last `window` - `count` pairs.

    Args:
        rows: R, the number of rows and pairs.
        count: the number of score columns, one for each own column.
        window: the number of positions that a row sees, its own included.
        device: the device of the mask.

    With a window of three and one own column, rows 1 to 3 see one score column (own) and two pairs:

        own | x x . .
        own | . x x .
        own | . . x x
    """
    band = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    return F.pad(band.triu(count + 1 - window), (count, 0, count, 0), value=True)
