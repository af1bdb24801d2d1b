"""A chain that ends where the draft is unsure, as Draft & Verify's does (Zhang et al. 2024,
2309.08168, section 3.3).

Drafting goes on while the draft law gave the last token at least the threshold γ. That token stays
in the chain, so how many draws a node gets, one or none, is settled by what was drawn above it,
before anything is drawn at it. After each verification γ follows how many of the drafted tokens
were accepted:

    α ← β₁ α + (1 - β₁) accepted / drafted γ ← β₂ γ + (1 - β₂) (γ + ε where α is below the goal,
    else γ - ε; as it is where the chain was as long as it may be)
"""

from dataclasses import dataclass
from typing import ClassVar

from treespec.trees.ranges import DEPTH, Range, outside
from treespec.trees.shape import Policy
from treespec.trees.static import TreeError


@dataclass(frozen=True)
class ConfidentChain(Policy):
    """depth: limit on the drafted tokens. threshold: the first γ. goal: the α that γ steers to.

    step: ε. rate_memory: β₁. memory: β₂. The defaults are those of the released code for greedy
    drafts; for sampled drafts it begins with γ = .5.
    """

    name: ClassVar[str] = "confident"

    depth: int = 8
    threshold: float = 0.8
    goal: float = 0.9
    step: float = 0.01
    rate_memory: float = 0.5
    memory: float = 0.9

    def __post_init__(self) -> None:
        share = Range(least=0, most=1)
        wrong = outside(
            self,
            depth=DEPTH,
            threshold=share,
            goal=share,
            step=share,
            rate_memory=share,
            memory=share,
        )
        if wrong:
            raise TreeError(f"confident chain: {wrong}")

    @property
    def max_depth(self) -> int:
        return self.depth

    @property
    def max_draws(self) -> int:
        return 1

    def update(
        self, threshold: float, rate: float, accepted: int, drafted: int
    ) -> tuple[float, float]:
        """γ and α after a verification."""
        rate = self.rate_memory * rate + (1 - self.rate_memory) * accepted / drafted
        step = self.step if rate < self.goal else -self.step if drafted < self.depth else 0.0
        return threshold + (1 - self.memory) * step, rate
