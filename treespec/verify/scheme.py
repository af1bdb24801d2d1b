"""The seam between drafting and verification: a law for the draws and a transport plan that answers
them.
"""

from typing import Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from treespec.trees.static import StaticTree, eagle
from treespec.trees.tree import Draws

Drawing = Literal["with replacement", "without replacement", "greedy", "tops and tail"]


class Scheme(Protocol):
    """One multi-draft verification scheme, pure functions over tensors.

    A scheme inherits the defaults below.

    The rule: for every p, q and k, the sum over draws of Pr(draws | q) * plan(p, q, draws) is p. A
    plan is a function of its own row only: the plan of one node may not depend on another node's
    draws.

    The properties say what a scheme can do. Code elsewhere asks them, never for the class or the
    name.
    """

    @property
    def name(self) -> str:
        """As `--verifier` takes it."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the rule holds."""
        return True

    @property
    def deterministic(self) -> bool:
        """Whether the draws are a function of q, so that trees may be pruned and reranked after
        drafting.
        """
        return False

    @property
    def max_draws(self) -> int | None:
        """Draws that a node may have; None: any number."""
        return None

    @property
    def law_per_draw(self) -> bool:
        """Whether q may be [B, K, V], a law for each draw."""
        return False

    @property
    def sure_tokens(self) -> bool:
        """Whether this is a `SureScheme`."""
        return False

    @property
    def layered(self) -> bool:
        """Whether this is a `treespec.verify.partial.LayerScheme`."""
        return False

    @property
    def accepted_in_turn(self) -> bool:
        """Whether a head's calibrated rates hold: draws without repeats, accepted one after
        another.
        """
        return False

    @property
    def drawing(self) -> Drawing | None:
        """How the draws are made, which decides their α* (`treespec.verify.rates.OPTIMA`); None: α*
        is not known.
        """
        return None

    @property
    def default_tree(self) -> StaticTree:
        """The tree of a draft model whose acceptance rates are not known."""
        return eagle()

    @property
    def draft_temperatures(self) -> tuple[float, ...]:
        """Of each draw in order, as multiples of the sampling temperature; the last repeats.

        (): all are 1.
        """
        return ()

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        """k draws at each of B nodes.

        q: [B, V] or [B, K, V] probabilities; k: an int, or [B] int64.
        """
        ...

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        """[B, V] probabilities of the output token given the draws. p: [B, V]; q: as for `draw`."""
        ...

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """[B] exact Pr(output is one of k draws), or None where no closed form is known."""
        ...


class SureScheme(Scheme, Protocol):
    """A scheme that also answers sure tokens: a node's likeliest ones, taken for sure beside the
    draws.
    """

    @property
    def sure_tokens(self) -> bool:
        return True

    @property
    def equal_draws(self) -> bool:
        """Whether any draw of a node is accepted as readily as another."""
        return False

    def draw_with_sure(
        self, q: Tensor, drawn: Tensor, sure: Tensor, generator: torch.Generator
    ) -> Draws:
        """The `sure` likeliest tokens of each node, and `drawn` draws from the rest of q.

        q: [B, V] probabilities. drawn, sure: [B] int64 on the host.
        """
        ...


def takes_sure_tokens(scheme: Scheme) -> TypeGuard[SureScheme]:
    return scheme.sure_tokens
