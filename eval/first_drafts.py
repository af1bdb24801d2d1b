"""Measure a head's drafts of step 1: how sure it is, how often it agrees with the target, and whether it is flat."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.api.calibrate import Row, fit_sharpness, iterate_draft_steps
from treespec.api.spec import Spec
from treespec.eval.intervals import Z
from treespec.sampling.probs import SamplingParams, compute_probs

CERTAIN_TARGET_PROBABILITY = 0.9  # the target is certain if its largest probability reaches this
ALL_POSITIONS = 10**6  # more positions than any text has


@dataclass(frozen=True)
class FirstStep:
    """Figures of the drafts of step 1.

    Attributes:
        bins: table rows by the target's largest probability.
        claimed: mean of the head's largest probability.
        right: agreement with the target.
        right_where_sure: agreement where the target is certain.
        sharper: ratio of accepted drafts at temperature 1, sharper logits over calibrated ones.
        least_sharper: lower end of that ratio's 95 % interval.
        positions: number of the drafts.
        sure_positions: number of those where the target is certain.
    """

    bins: list[dict[str, str]]
    claimed: float
    right: float
    right_where_sure: float
    sharper: float
    least_sharper: float
    positions: int
    sure_positions: int


@dataclass(frozen=True)
class FirstDrafts:
    """The drafts of step 1 at n positions.

    Attributes:
        target_top: [n] the target's largest probability.
        head_top: [n] the head's largest probability.
        agrees: [n] 1 if both have the same most likely token, else 0.
        accepted: [n] Pr(a draft is accepted) at temperature 1, with the head's calibration.
        accepted_sharper: [n] the same with the factor that maximises it.
    """

    target_top: Tensor
    head_top: Tensor
    agrees: Tensor
    accepted: Tensor
    accepted_sharper: Tensor

    @classmethod
    def concat(cls, parts: Sequence["FirstDrafts"]) -> "FirstDrafts":
        """Concatenate the positions of all parts."""
        return cls(
            target_top=torch.cat([part.target_top for part in parts]),
            head_top=torch.cat([part.head_top for part in parts]),
            agrees=torch.cat([part.agrees for part in parts]),
            accepted=torch.cat([part.accepted for part in parts]),
            accepted_sharper=torch.cat([part.accepted_sharper for part in parts]),
        )


def draft_first_step(spec: Spec, rows: Sequence[Row], sharpness: tuple[float, ...]) -> FirstStep:
    """Measure the drafts of step 1 on `rows`. sharpness: factors of the head's calibration; (): no calibration."""
    # 1. Figures of each position.
    params = SamplingParams(1.0)
    calibrated_factor = sharpness[0] if sharpness else 1.0
    head = spec.head
    assert head is not None
    (sharpest_factor,) = fit_sharpness(head, spec.target, rows, 1, ALL_POSITIONS)
    parts = list[FirstDrafts]()
    for step in iterate_draft_steps(head, spec.target, rows, 1, ALL_POSITIONS):
        p = compute_probs(step.target[step.chosen], params)
        logits = step.draft[step.chosen]
        q = compute_probs(logits, params)
        calibrated = compute_probs(logits * calibrated_factor, params)
        sharp = compute_probs(logits * sharpest_factor, params)
        part = FirstDrafts(
            target_top=p.amax(-1),
            head_top=q.amax(-1),
            agrees=(q.argmax(-1) == p.argmax(-1)).to(p.dtype),
            accepted=torch.minimum(p, calibrated).sum(-1),
            accepted_sharper=torch.minimum(p, sharp).sum(-1),
        )
        parts.append(part)
    drafts = FirstDrafts.concat(parts)

    # 2. Their means, over all positions and over those where the target is certain.
    agrees_where_sure = drafts.agrees[drafts.target_top >= CERTAIN_TARGET_PROBABILITY]
    if len(agrees_where_sure) == 0:
        agrees_where_sure = drafts.agrees
    sharper = float(drafts.accepted_sharper.mean() / drafts.accepted.mean())
    spread = (drafts.accepted_sharper - sharper * drafts.accepted).std(correction=0)
    error = float(spread / drafts.accepted.mean()) / len(drafts.agrees) ** 0.5
    return FirstStep(
        bins=make_certainty_cells(drafts),
        claimed=float(drafts.head_top.mean()),
        right=float(drafts.agrees.mean()),
        right_where_sure=float(agrees_where_sure.mean()),
        sharper=sharper,
        least_sharper=sharper - Z * error,
        positions=len(drafts.agrees),
        sure_positions=len(agrees_where_sure),
    )


def make_certainty_cells(drafts: FirstDrafts) -> list[dict[str, str]]:
    """Make table rows of the first drafts, by the target's largest probability."""
    rows = []
    for low, high in (
        (0, 0.5),
        (0.5, CERTAIN_TARGET_PROBABILITY),
        (CERTAIN_TARGET_PROBABILITY, 1.01),
    ):
        in_bin = (drafts.target_top >= low) & (drafts.target_top < high)
        if in_bin.any():
            row = {
                "probability": f"{low:g} to {min(high, 1):g}",
                "positions": f"{in_bin.float().mean():.1%}",
                "agreement": f"{drafts.agrees[in_bin].mean():.1%}",
                "the head's own probability": f"{drafts.head_top[in_bin].mean():.1%}",
                "accepted at temperature 1": f"{drafts.accepted[in_bin].mean():.1%}",
            }
            rows.append(row)
    return rows
