"""Trees that grow together: a level of all texts is one step of the draft model."""

from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from treespec.draft.proposer import Frontier
from treespec.trees.tree import TokenTree, root_only

Grown = TypeVar("Grown")
Growing = Generator[
    Frontier, Tensor, Grown
]  # gives a frontier, is sent the [F, N] draft logits of its children
Growth = Growing[TokenTree]


def ungrown(root: Tensor) -> Growth:
    """The root alone, for a text without drafts. root: [1] int64."""
    yield from ()
    return root_only(root)


class Extends(Protocol):
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]: ...


def grow_together(proposer: Extends, growths: Sequence[Growing[Grown]]) -> list[Grown]:
    """What each text's growth returns; those that have ended wait for the others."""
    grown: dict[int, Grown] = {}

    def step(row: int, logits: Tensor | None) -> Frontier | None:
        try:
            return next(growths[row]) if logits is None else growths[row].send(logits)
        except StopIteration as end:
            grown[row] = end.value
            return None

    frontiers = [step(row, None) for row in range(len(growths))]
    while any(frontiers):
        below = proposer.extend(frontiers)
        frontiers = [
            step(row, below[row]) if frontier else None for row, frontier in enumerate(frontiers)
        ]
    return [grown[row] for row in range(len(growths))]
