"""The seam of verifiers, and the walk: sample the plan at every node, follow the tokens that are children."""

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from treespec.sampling import sample
from treespec.trees.tree import Draws, TokenTree
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes from the root down, without the root. tokens: theirs, and the one after them."""

    path: list[int]
    tokens: list[int]


class Verifier(Protocol):
    """Keeps a path of a tree. name: as `--verifier` takes it. scheme: whose draws the tree holds."""

    @property
    def name(self) -> str: ...
    @property
    def scheme(self) -> Scheme: ...

    def __call__(self, tree: TokenTree, p: Tensor, generator: torch.Generator) -> Verdict:
        """p: [N, V] probabilities."""
        ...


@final
@dataclass(frozen=True)
class Walk:
    """Samples the plan at the root, goes to the child with that token, and so on; at a leaf it samples p.

    Lossless for every lossless scheme: each output token has the target's law given the text before it.
    Where a scheme's draws are a function of the text, a node's draws are its children.
    The plan is sampled at all nodes at once and only the path's samples are used; the host waits once.
    """

    scheme: Scheme

    @property
    def name(self) -> str:
        return self.scheme.name

    def __call__(self, tree: TokenTree, p: Tensor, generator: torch.Generator) -> Verdict:
        if tree.drafts:
            nodes = tree.drafts.nodes
            p = p.index_copy(0, nodes, self.scheme.plan(p[nodes], tree.drafts.q, tree.drafts.draws))
        elif not self.scheme.lossless:  # the lossless plan is p
            children = tree.tokens.where(tree.parents == torch.arange(len(p), device=p.device)[:, None], -1)
            p = self.scheme.plan(p, p, Draws(children))
        return follow(tree, sample(p, generator))


def follow(tree: TokenTree, choice: Tensor) -> Verdict:
    """The path along the tokens chosen at the nodes, [N] int64; at temperature 0 they are the target's own."""
    rows = torch.arange(len(choice), device=choice.device)
    child = (tree.parents == rows[:, None]) & (tree.tokens == choice[:, None])  # [N, N]
    first = torch.where(child.any(1), child.int().argmax(1), -1)
    following, chosen = torch.stack([first, choice]).tolist()
    path = [0]
    while (node := following[path[-1]]) >= 0:
        path.append(node)
    return Verdict(path[1:], [chosen[node] for node in path])
