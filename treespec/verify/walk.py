"""The walk over a tree: sample the plan at every node, follow the tokens that are children."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treespec.sampling import sample
from treespec.trees.tree import TokenTree
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes from the root down, without the root. tokens: theirs, and the one after them."""

    path: list[int]
    tokens: list[int]


class Verifier(Protocol):
    def __call__(self, tree: TokenTree, p: Tensor, generator: torch.Generator) -> Verdict:
        """p: [N, V] probabilities, or [N] int64 at temperature 0: the only possible token at each node."""
        ...


def walk(scheme: Scheme, tree: TokenTree, p: Tensor, generator: torch.Generator) -> Verdict:
    """Lossless for every lossless scheme: each output token has the target's law given the text before it.

    The plan is sampled at all nodes at once and only the path's samples are used; the host waits once.
    """
    if tree.drafts and p.is_floating_point():
        nodes = tree.drafts.nodes
        p = p.index_copy(0, nodes, scheme.plan(p[nodes], tree.drafts.q, tree.drafts.draws))
    choice = sample(p, generator) if p.is_floating_point() else p  # [N]
    rows = torch.arange(len(choice), device=choice.device)
    child = (tree.parents == rows[:, None]) & (tree.tokens == choice[:, None])  # [N, N]
    first = torch.where(child.any(1), child.int().argmax(1), -1)
    following, chosen = torch.stack([first, choice]).tolist()
    path = [0]
    while (node := following[path[-1]]) >= 0:
        path.append(node)
    return Verdict(path[1:], [chosen[node] for node in path])
