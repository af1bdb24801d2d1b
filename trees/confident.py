"""A chain that ends where the draft is unsure, by a threshold that follows the acceptance rate."""

from dataclasses import dataclass, replace
from typing import ClassVar

from treespec.trees.ranges import DEPTH_RANGE, Range
from treespec.trees.shape import Builder, Growth, Policy

FRACTION_RANGE = Range(least=0, most=1)


@dataclass(frozen=True)
class ConfidentChain(Policy):
    """The chain of Draft & Verify (Zhang et al. 2024, 2309.08168, Section 3.3).

    It ends below the first token of less draft probability than a threshold γ. That token stays in the chain. So
    the tokens above a node decide whether it gets a draw, before the draw is made. With γ = .6:

        draft probability     .9   .7   .4   .8
        chain            root  a -- b -- c            no d, whatever its probability

    After each verification γ moves, so that the acceptance rate stays near a goal α:

        AR ← β₁ AR + (1 - β₁) accepted / drafted
        γ  ← γ + (1 - β₂) ε        if AR < α
             γ - (1 - β₂) ε        if AR >= α and the chain was not of full depth

    Attributes:
        depth: the largest number of draft tokens.
        threshold: γ.
        goal: α.
        step: ε.
        rate: AR.
        rate_memory: β₁.
        threshold_memory: β₂.
    """

    name = "confident"
    ranges: ClassVar = {
        "depth": DEPTH_RANGE,
        "threshold": FRACTION_RANGE,
        "goal": FRACTION_RANGE,
        "step": FRACTION_RANGE,
        "rate": FRACTION_RANGE,
        "rate_memory": FRACTION_RANGE,
        "threshold_memory": FRACTION_RANGE,
    }

    depth: int = 8
    threshold: float = 0.8
    goal: float = 0.9
    step: float = 0.01
    rate: float = 0.0
    rate_memory: float = 0.5
    threshold_memory: float = 0.9

    @property
    def max_draws(self) -> int:
        return 1

    def grow(self, build: Builder) -> Growth:
        return build.grow_confident(self.depth, self.threshold)

    def adapt(self, accepted: int, drafted: int) -> "ConfidentChain":
        rate = self.rate_memory * self.rate + (1 - self.rate_memory) * accepted / drafted
        change = (1 - self.threshold_memory) * self.step
        threshold = self.threshold
        if rate < self.goal:
            threshold = min(threshold + change, 1.0)
        elif drafted < self.depth:
            threshold = max(threshold - change, 0.0)
        return replace(self, threshold=threshold, rate=rate)
