"""The seam between drafting and verification: a law for the draws and a transport plan that answers them."""

from typing import Protocol

import torch
from torch import Tensor

from treespec.trees.tree import Draws


class Scheme(Protocol):
    """One multi-draft verification scheme, pure functions over tensors.

    The rule: for every p, q and k, the sum over draws of Pr(draws | q) * plan(p, q, draws) is p.
    A plan is a function of its own row only: what it says of one node may not depend on another node's draws.
    deterministic: the draws are a function of q, so trees may be pruned and reranked after drafting.
    lossless: whether the rule holds. max_draws: how many draws a node may have, None for any number.
    """

    @property
    def name(self) -> str: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def lossless(self) -> bool: ...
    @property
    def max_draws(self) -> int | None: ...

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        """k draws at each of B nodes. q: [B, V] or [B, K, V] probabilities; k: an int, or [B] int64."""
        ...

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        """[B, V] probabilities of the output token given the draws. p: [B, V]; q: as for `draw`."""
        ...

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """[B] exact Pr(output is one of k draws), or None where no closed form is known."""
        ...
