"""Trees that grow level by level: one draft step extends the trees of all sequences by a level."""

from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar, final

import torch
from torch import Tensor

from treespec.draft.drafter import Frontier
from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import Drafts, TokenTree, connect, root_only

Grown = TypeVar("Grown")
# A generator that yields a frontier of F nodes and is sent the draft logits [F, V] below them.
Growing = Generator[Frontier, Tensor, Grown]
Growth = Growing[TokenTree]


def ungrown(root: Tensor) -> Growth:
    """A tree of the root alone, for a sequence without drafts. root: [1] int64."""
    yield from ()
    return root_only(root)


class Extends(Protocol):
    """The part of a proposer that grows trees by a level."""

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """For each sequence the draft logits [F, V] below its frontier; None is a finished tree."""
        ...


def grow_together(proposer: Extends, growths: Sequence[Growing[Grown]]) -> list[Grown]:
    """Run the growth of each sequence, a level of all at a time, and return the trees."""
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


@final
class Nodes:
    """A growing tree. Nodes are numbered in the order in which they are added; the root is 0.

    Two levels added to a root, `add([a, b], [0, 0])` and `add([c, d], [1, 2])`:

        0 ─┬─ 1 ─── 3      tokens     root  a b  c d
           └─ 2 ─── 4      parents    -1    0 0  1 2
                           depths     0     1 1  2 2
    """

    def __init__(self, root: Tensor) -> None:
        """root: [1] int64, on the device that the tree is for."""
        self.tokens, self.parents, self.count = [root], [root.new_zeros(1)], 1

    def add(self, tokens: Tensor, parents: Tensor) -> None:
        """Add a level. tokens: [M] int64. parents: [M] int64, the numbers of their parents."""
        device = self.tokens[0].device
        self.tokens.append(tokens.to(device))
        self.parents.append(parents.to(device))
        self.count += len(tokens)

    def frontier(self, places: Tensor, rows: Tensor) -> Frontier:
        """F nodes of the last level.

        places: [F] their places in the level. rows: [F] the rows of their parents in the frontier
        above.
        """
        last = self.tokens[-1]
        return Frontier(last[places.to(last.device)], rows.to(last.device))

    def tree(self, kept: Tensor | None = None, drafts: Drafts | None = None) -> TokenTree:
        """The nodes as a token tree.

        kept: [N] numbers of the nodes to keep, parents before children, first the root's 0.
        Default: all nodes.
        """
        tokens, parents = torch.cat(self.tokens), torch.cat(self.parents)
        sizes = torch.tensor([len(level) for level in self.tokens])
        depth = torch.arange(len(sizes)).repeat_interleave(sizes).to(tokens.device)
        kept = torch.arange(self.count) if kept is None else kept
        kept = kept.to(tokens.device)
        links = connect(kept, parents)
        ancestors = ancestor_mask(links, len(sizes) - 1)
        return TokenTree(tokens[kept], links, depth[kept], ancestors, drafts)
