"""How good a head is: agreement with the target per draft step, and the acceptance length that predicts."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.heads.head import Head
from treespec.target import Target


@dataclass(frozen=True)
class Validation:
    """agreement: at draft step 1, 2, … the share of positions whose likeliest token is the target's.

    acceptance_length: 1 + the mean run of agreeing steps, what a chain of so many nodes would have accepted
    where the target follows the text, in tokens a cycle. positions: how many were looked at.
    """

    agreement: list[float]
    acceptance_length: float
    positions: int


@torch.no_grad()
def validate(head: Head, target: Target, rows: Iterable[tuple[Tensor, Tensor, Tensor]], steps: int) -> Validation:
    """rows: tokens [T] int64, loss mask [T] bool, features [T, F] of each held-out conversation.

    steps: at most, as a head may have fewer.
    """
    steps = draft_steps(head, steps)
    agreeing, runs, positions = torch.zeros(steps), 0.0, 0
    for tokens, mask, features in rows:
        agree = rollout_agreement(head, target, tokens, features, steps)  # [T - steps - 1, steps]
        agree = agree[mask[2 : 2 + len(agree)]]
        agreeing += agree.float().sum(0).cpu()
        runs += float(agree.int().cumprod(-1).sum())
        positions += len(agree)
    return Validation((agreeing / max(positions, 1)).tolist(), 1 + runs / max(positions, 1), positions)


def rollout_agreement(head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int) -> Tensor:
    """[R, steps] bool: from each of R = T - steps - 1 positions, whether draft step d finds the target's token.

    `Kind.rollout` says what a draft step is along a text.
    """
    given, last = target.parted(features, head.taps)
    wanted = target.output_logits(last).argmax(-1)  # [T]
    agree = [
        logits.argmax(-1) == wanted[step : step + len(logits)]
        for step, logits in enumerate(KINDS[head.kind].rollout(head, target, tokens, given, steps), start=1)
    ]
    return torch.stack(agree, dim=1) if agree else torch.zeros(0, steps, dtype=torch.bool)


def describe(result: Validation) -> str:
    """A validation in a line."""
    if not result.positions:
        return "the head was not validated: no held-out conversation is long enough"
    steps = " ".join(f"{share:.1%}" for share in result.agreement)
    return (
        f"top-1 agreement by draft step {steps}; a chain would accept {result.acceptance_length:.2f} tokens a cycle "
        f"({result.positions} held-out positions)"
    )
