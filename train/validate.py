"""How good a head is: agreement with the target per draft step, and the acceptance length that predicts."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.cache import TreeLayer
from treespec.heads.eagle import EagleHead
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
def validate(head: EagleHead, target: Target, rows: Iterable[tuple[Tensor, Tensor, Tensor]], steps: int) -> Validation:
    """rows: tokens [T] int64, loss mask [T] bool, features [T, H] of each held-out conversation."""
    agreeing, runs, positions = torch.zeros(steps), 0.0, 0
    for tokens, mask, features in rows:
        agree = rollout_agreement(head, target, tokens, features, steps)  # [T - steps - 1, steps]
        agree = agree[mask[2 : 2 + len(agree)]]
        agreeing += agree.float().sum(0).cpu()
        runs += float(agree.int().cumprod(-1).sum())
        positions += len(agree)
    return Validation((agreeing / max(positions, 1)).tolist(), 1 + runs / max(positions, 1), positions)


def rollout_agreement(head: EagleHead, target: Target, tokens: Tensor, features: Tensor, steps: int) -> Tensor:
    """[R, steps] bool: from each of R = T - steps - 1 positions, whether draft step d finds the target's token.

    A rollout from position t uses true pairs up to t, then its own features with the text's tokens. All
    rollouts run at once, step d being one more stretch of the cache, of which a row sees only its own entry:

        row t sees   | pairs 0 .. t | step 2 of t | step 3 of t | ...
    """
    rollouts = len(tokens) - steps - 1
    if rollouts <= 0:
        return torch.zeros(0, steps, dtype=torch.bool)
    wanted = target.output_logits(features).argmax(-1)  # [T]
    cache = TreeLayer(capacity=rollouts * steps)
    dtype = head.fc.weight.dtype
    hidden = features[:rollouts].to(dtype)
    seen = torch.ones(rollouts, rollouts, dtype=torch.bool, device=hidden.device).tril()
    own = torch.eye(rollouts, dtype=torch.bool, device=hidden.device)
    agree = []
    for step in range(steps):
        positions = torch.arange(step, step + rollouts, device=hidden.device)
        following = tokens[step + 1 : step + 1 + rollouts]
        hidden = head(following[None], hidden[None], positions, seen, cache)[0]
        cache.length += rollouts
        seen = torch.cat([seen, own], dim=1)
        drafted = target.output_logits(hidden.to(features.dtype)).argmax(-1)
        agree.append(drafted == wanted[step + 1 : step + 1 + rollouts])
    return torch.stack(agree, dim=1)
