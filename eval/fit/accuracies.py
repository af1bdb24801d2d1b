"""How often each of a head's likeliest tokens is the target's, by depth."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from treespec.draft.fit.calibrate import Row
from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.errors import InputError
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, largest, probs

if TYPE_CHECKING:
    from treespec.heads.head import Head


@torch.no_grad()
def accuracies(
    head: "Head",
    target: Target,
    rows: Iterable[Row],
    depth: int,
    ranks: int,
    temperature: float = 0.0,
) -> Tensor:
    """[D, R] float64: the target's mean probability of the head's r-th likeliest token at step d.

    Steps and ranks count from 0. At temperature 0 it is the share of positions at which that token
    is the target's choice. D: `depth`, or less if the head drafts less. R: `ranks`, or V if that is
    less. rows: texts with their features (see `Row`). Raises InputError if they are too short.
    """
    # 1. One row of the table per step.
    depth, ranks = draft_steps(head, depth), min(ranks, target.vocab_size)
    total, positions = torch.zeros(depth, ranks, dtype=torch.float64), 0
    params = SamplingParams(temperature)
    for tokens, counts, features in rows:
        # 2. The target's law of token t + 1 in row t, [T, V].
        inputs, last = target.parted(features, head.taps)
        p = probs(target.output_logits(last), params)

        # 3. The positions whose first draft counts; draft step d from t is of token t + d + 2.
        starts = max(0, len(tokens) - depth - 1)
        chosen = counts[2 : 2 + starts].nonzero().squeeze(1)
        positions += len(chosen)
        for d, logits in enumerate(KINDS[head.kind].rollout(head, target, tokens, inputs, depth)):
            likeliest = largest(logits[chosen], ranks)[1]
            total[d] += p[chosen + d + 1].gather(1, likeliest).sum(0).double().cpu()
    if not positions:
        raise InputError("the text is too short to measure a head on: give longer conversations")
    return total / positions
