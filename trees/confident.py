"""A chain that ends where the draft is unsure (Zhang et al. 2024, Draft & Verify, 2309.08168).

Section 3.3: drafting continues while the draft gave the last token at least probability γ. The
unsure token stays in the chain. So the tokens above a node settle whether it gets a draw, before
that draw is made, and the output keeps the target's distribution. After each verification γ moves
towards a goal for the acceptance rate α:

    α ← β₁ α + (1 - β₁) accepted / drafted
    γ ← β₂ γ + (1 - β₂) γ'      γ' = γ + ε   where α is below the goal
                                     γ - ε   where it is not and the chain ended early
                                     γ       where it is not and the chain had full depth
"""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.ranges import DEPTH, Range
from treespec.trees.shape import Builder, Growth, Policy

SHARE = Range(least=0, most=1)


@dataclass(frozen=True)
class ConfidentChain(Policy):
    """The chain's limits and the constants of the rule for γ.

    depth: the largest number of drafted tokens.
    threshold: the first γ, a probability.
    goal: the acceptance rate α that γ steers to.
    step: ε. rate_memory: β₁. memory: β₂.

    The defaults are those of the released code for greedy drafts. For sampled drafts that code
    starts with γ = .5.
    """

    name, max_draws = "confident", 1
    shares = ("threshold", "goal", "step", "rate_memory", "memory")
    ranges: ClassVar = {"depth": DEPTH} | dict.fromkeys(shares, SHARE)

    depth: int = 8
    threshold: float = 0.8
    goal: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    memory: float = 0.9

    @property
    def first(self) -> tuple[float, float]:
        """γ and α."""
        return self.threshold, 0.0

    def grow(self, build: Builder, known: tuple[float, float]) -> Growth:
        return build.chain(self.depth, known[0])

    def update(
        self, known: tuple[float, float], accepted: int, drafted: int
    ) -> tuple[float, float]:
        if not drafted:
            return known
        threshold, rate = known
        rate = self.rate_memory * rate + (1 - self.rate_memory) * accepted / drafted
        step = self.step if rate < self.goal else -self.step if drafted < self.depth else 0.0
        return threshold + (1 - self.memory) * step, rate
