"""How often each of a head's likeliest tokens is the target's, by depth."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from treespec.draft.fit.calibrate import Row
from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.errors import InputError
from treespec.sampling import SamplingParams, largest, probs
from treespec.target import Target


@torch.no_grad()
def accuracies(
    head: Any, target: Target, rows: Iterable[Row], depth: int, ranks: int, temperature: float = 0.0
) -> Tensor:
    """[D, R] float64: the mean of p, at draft step d, of the head's r-th likeliest token, both from 0.

    At temperature 0 that is the share of positions where it is the target's choice. D is `depth`, or as many as the
    head drafts; R is `ranks`, or V. Raises InputError where the text is too short.
    """
    depth, ranks = draft_steps(head, depth), min(ranks, target.vocab_size)
    total, positions = torch.zeros(depth, ranks, dtype=torch.float64), 0
    for tokens, counts, known in rows:
        given, last = target.parted(known, head.taps)
        law = probs(
            target.output_logits(last), SamplingParams(temperature)
        )  # [T, V], row t: of token t + 1
        starts = max(0, len(tokens) - depth - 1)
        chosen = counts[2 : 2 + starts].nonzero().squeeze(1)  # positions whose first draft counts
        positions += len(chosen)
        for d, logits in enumerate(KINDS[head.kind].rollout(head, target, tokens, given, depth)):
            best = largest(logits[chosen], ranks)[1]
            total[d] += law[chosen + d + 1].gather(1, best).sum(0).double().cpu()
    if not positions:
        raise InputError("the text is too short to measure a head on: give longer conversations")
    return total / positions
