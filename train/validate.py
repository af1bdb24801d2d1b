"""How well a head agrees with its target, and the acceptance length that this predicts."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.draft.trained.kinds import KINDS, draft_steps
from treespec.heads.head import Head
from treespec.model.target import Target


@dataclass(frozen=True)
class Validation:
    """agreement: for draft step 1, 2, … the share of positions with the target's likeliest token.

    acceptance_length: 1 + the mean run of agreeing steps, in tokens a cycle: what a chain of these
    steps would commit where the target follows the text.
    positions: the number of positions behind both figures.
    decoded_length: tokens a cycle while the target answers held-out prompts with such chains; None
    where none was asked.
    """

    agreement: list[float]
    acceptance_length: float
    positions: int
    decoded_length: float | None = None


@torch.no_grad()
def validate(
    head: Head, target: Target, rows: Iterable[tuple[Tensor, Tensor, Tensor]], steps: int
) -> Validation:
    """rows: for each held-out conversation tokens [T] int64, loss mask [T] bool, features [T, F].

    steps: draft steps to validate; a head may have fewer.
    """
    steps = draft_steps(head, steps)
    agreeing, runs, positions = torch.zeros(steps), 0.0, 0
    for tokens, mask, features in rows:
        agree = rollout_agreement(head, target, tokens, features, steps)  # [T - steps - 1, steps]
        agree = agree[mask[2 : 2 + len(agree)]]
        agreeing += agree.float().sum(0).cpu()
        runs += float(agree.int().cumprod(-1).sum())
        positions += len(agree)
    return Validation(
        (agreeing / max(positions, 1)).tolist(), 1 + runs / max(positions, 1), positions
    )


def rollout_agreement(
    head: Head, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Tensor:
    """[R, steps] bool: whether draft step d from position r finds the target's likeliest token.

    `Kind.rollout` says what a draft step is along a text.
    """
    tapped, last = target.parted(features, head.taps)
    wanted = target.output_logits(last).argmax(-1)  # [T]
    agree = [
        logits.argmax(-1) == wanted[step : step + len(logits)]
        for step, logits in enumerate(
            KINDS[head.kind].rollout(head, target, tokens, tapped, steps), start=1
        )
    ]
    return torch.stack(agree, dim=1) if agree else torch.zeros(0, steps, dtype=torch.bool)


def describe(result: Validation) -> str:
    """A validation in a line."""
    if not result.positions:
        return "the head was not validated: no held-out conversation is long enough"
    steps = " ".join(f"{share:.1%}" for share in result.agreement)
    said = (
        f"top-1 agreement by draft step {steps}; "
        f"a chain would accept {result.acceptance_length:.2f} tokens a cycle "
        f"({result.positions} held-out positions)"
    )
    if result.decoded_length is None:
        return said
    return f"{said}; decoding accepts {result.decoded_length:.2f}"
