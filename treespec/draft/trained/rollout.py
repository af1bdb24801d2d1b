"""A head along a given text: what it extrapolates when it drafts from every position at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from treespec.draft.vocabulary import whole
from treespec.heads.features import FeatureHead
from treespec.model.cache import TreeLayer
from treespec.model.target import Target


@torch.no_grad()
def rollout(
    head: FeatureHead, target: Target, tokens: Tensor, features: Tensor, steps: int
) -> Iterator[Tensor]:
    """[R, V] the draft logits of step 1, 2, … from each of R = T - steps - 1 positions.

    tokens: [T] int64. features: [T, F] the target's. Row t of step d has the logits of token
    t + d + 1. A rollout from position t uses true pairs up to t, then its own features with the
    text's tokens. All rollouts run at once. Each step appends a stretch to the cache; a row sees
    only its own entry of it:

        row t sees   | pairs 0 .. t | step 2 of t | step 3 of t | ...

    A text of fewer than steps + 2 tokens yields nothing.
    """
    rollouts = len(tokens) - steps - 1
    if rollouts <= 0:
        return
    caches = [TreeLayer(capacity=rollouts * steps) for _ in head.attentions]
    hidden = head.fuse(features[:rollouts].to(head.dtype))
    seen = torch.ones(rollouts, rollouts, dtype=torch.bool, device=hidden.device).tril()
    own = torch.eye(rollouts, dtype=torch.bool, device=hidden.device)
    for step in range(steps):
        positions = torch.arange(step, step + rollouts, device=hidden.device)
        following = tokens[step + 1 : step + 1 + rollouts]
        hidden = head.step(following[None], hidden[None], positions, seen, caches)[0]
        for cache in caches:
            cache.length += rollouts
        seen = torch.cat([seen, own], dim=1)
        yield whole(head.logits(hidden.to(features.dtype), target), head, target)
