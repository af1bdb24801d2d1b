"""Trees of several texts that grow together: one draft step extends all of them by a level."""

from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from treespec.draft.proposer import Frontier
from treespec.trees.tree import TokenTree, root_only

Grown = TypeVar("Grown")
# A generator that yields a frontier of F nodes and is sent the draft logits [F, V] below them.
Growing = Generator[Frontier, Tensor, Grown]
Growth = Growing[TokenTree]


def ungrown(root: Tensor) -> Growth:
    """A tree of the root alone, for a text without drafts. root: [1] int64."""
    yield from ()
    return root_only(root)


class Extends(Protocol):
    """The part of a proposer that grows trees by a level."""

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """For each text the draft logits [F, V] below its frontier; None is a finished tree."""
        ...


def grow_together(proposer: Extends, growths: Sequence[Growing[Grown]]) -> list[Grown]:
    """Run the growth of each text, a level of all texts at a time, and return the trees."""
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
