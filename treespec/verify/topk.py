"""Deterministic drafts (EAGLE-2 and 3, retrieval): the most likely tokens, or any fixed set."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.trees.tree import Draws
from treespec.verify.distributions import keep_first, select_most_likely, sum_mass_on
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class TopK(Scheme):
    """The k most likely tokens of q. The output is sampled from p, and accepted if it is a draw.

    That is optimal for these draws. q may be any scores [B, V], such as logits: only their order
    counts. Two draws of five tokens:

        q                   .15  .25  .3   .2   .1      draws 2 1
        p                   .4   .3   .2   .1   0
        plan                .4   .3   .2   .1   0       p itself
        acceptance rate     .2 + .3 = .5
    """

    name = "topk"
    deterministic = True
    takes_most_likely = True
    drawing = "most likely"

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        return Draws(keep_first(select_most_likely(q, width), number))

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        return p

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor:
        draws = Draws(select_most_likely(q, k))
        return sum_mass_on(self.plan(p, q, draws), draws.tokens)


@final
@dataclass(frozen=True)
class Typical(TopK):
    """Typical acceptance (Cai et al. 2024, Medusa): a draw x passes if p(x) > min(epsilon, delta exp(-H(p))).

    H is the entropy in nats. The output is the passing draw with the largest p; if none passes,
    it is sampled from p. This is lossy: the text is likelier than the target's. q may be any
    scores [B, V], and plans do not read it. Draws 2 and 1 of five tokens, at the default thresholds:

        p                   .4   .3   .2   .1   0       H = 1.28, threshold min(.09, .3 exp(-H)) = .083
        passes                   yes  yes
        plan                0    1    0    0    0

    Args:
        epsilon: the absolute threshold, a probability.
        delta: the factor of the relative threshold.

    Raises:
        InputError: either lies outside (0, 1].
    """

    name = "typical"
    lossless = False

    epsilon: float = 0.09
    delta: float = 0.3

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        token_index = draws.tokens.clamp(min=0)
        # The draw with the largest p [B, 1]; if it does not pass, none does.
        mass, best = (p.gather(1, token_index) * (draws.tokens >= 0)).max(-1, keepdim=True)
        chosen = torch.zeros_like(p).scatter_(1, token_index.gather(1, best), 1.0)
        return chosen.where(mass > self.compute_threshold(p), p)

    def compute_threshold(self, p: Tensor) -> Tensor:
        """Return [B, 1] the probability that a draw must exceed to pass."""
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        return (self.delta * (-entropy).exp()).clamp(max=self.epsilon)
