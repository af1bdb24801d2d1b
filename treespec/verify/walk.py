"""The seam of verifiers, and the walk: sample the plan at every node, follow the tokens that are
children.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from treespec.sampling import TargetLaws, sample
from treespec.trees.tree import Draws, TokenTree
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes from the root down, without the root.

    tokens: theirs, and the one after them.
    """

    path: list[int]
    tokens: list[int]


class Verifier(Protocol):
    """Keeps a path of a tree. name: as `--verifier` takes it. scheme: whose draws the tree holds."""

    @property
    def name(self) -> str: ...
    @property
    def scheme(self) -> Scheme: ...

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        """p: [N, V] probabilities."""
        ...


def is_paced(verifier: Verifier) -> bool:
    """Whether a verifier takes any tree, so that each cycle's tree may be chosen by its cost.

    It says so by an attribute `paced`; without one it does not.
    """
    return getattr(verifier, "paced", False)


@final
@dataclass(frozen=True)
class Walk:
    """Samples the plan at the root, goes to the child with that token, and so on; at a leaf it
    samples p.

    Lossless for every lossless scheme: each output token has the target's law given the text before
    it. Where a scheme's draws are a function of the text, a node's draws are its children. On a CPU
    the walk computes laws and plans only for the nodes of its path, one after another. On another
    device it samples the plan at all nodes at once and uses the path's samples, so that the host
    waits once.
    """

    scheme: Scheme
    paced: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.scheme.name

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        return (self.step_by_step if p.device.type == "cpu" else self.at_once)(tree, p, generator)

    def at_once(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        return follow(tree, sample(self.plans(tree, p), generator))

    def step_by_step(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        child: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(
            torch.stack([tree.parents, tree.tokens]).mT.tolist()
        ):
            child.setdefault((parent, token), node)
        row_of = (
            {node: row for row, node in enumerate(tree.drafts.nodes.tolist())}
            if tree.drafts
            else {}
        )
        path, tokens = [0], []
        while True:
            at = path[-1]
            tokens.append(int(sample(self.plan_at(tree, p, at, row_of.get(at)), generator)))
            following = child.get((at, tokens[-1]))
            if following is None:
                return Verdict(path[1:], tokens)
            path.append(following)

    def plans(self, tree: TokenTree, p: Tensor | TargetLaws) -> Tensor:
        """[N, V] the law of the output at every node."""
        if tree.drafts:
            nodes = tree.drafts.nodes
            return p[:].index_copy(
                0, nodes, self.scheme.plan(p[nodes], tree.drafts.q, tree.drafts.draws)
            )
        if self.scheme.lossless:
            return p[:]  # the plan is p
        return self.scheme.plan(p[:], p[:], Draws(children_of(tree)))

    def plan_at(
        self, tree: TokenTree, p: Tensor | TargetLaws, node: int, row: int | None
    ) -> Tensor:
        """[1, V] the law of the output at one node.

        row: the node's row in the tree's drafts; None: it has none.
        """
        law = p[node : node + 1]
        if tree.drafts and row is not None:
            return self.scheme.plan(
                law, tree.drafts.q[row : row + 1], drawn_at(row, tree.drafts.draws)
            )
        if self.scheme.lossless:
            return law
        return self.scheme.plan(law, law, Draws(children_of(tree)[node : node + 1]))


def drawn_at(row: int, draws: Draws) -> Draws:
    """The draws of one node, without the columns that only other nodes fill."""
    tokens = draws.tokens[row : row + 1]
    width = 1 + max((i for i, token in enumerate(tokens[0].tolist()) if token >= 0), default=0)
    return draws.each(lambda field: field[row : row + 1, :width])


def children_of(tree: TokenTree) -> Tensor:
    """[N, N] the token of each node in the row of its parent, -1 elsewhere."""
    rows = torch.arange(len(tree.parents), device=tree.parents.device)
    return tree.tokens.where(tree.parents == rows[:, None], -1)


def follow(tree: TokenTree, choice: Tensor) -> Verdict:
    """The path along the tokens chosen at the nodes, [N] int64; at temperature 0 they are the
    target's own.
    """
    return follow_all([tree], [choice])[0]


def follow_all(trees: Sequence[TokenTree], choices: Sequence[Tensor]) -> list[Verdict]:
    """`follow` in each of several trees; the host waits once."""
    steps = [
        torch.stack([next_nodes(tree, choice), choice])
        for tree, choice in zip(trees, choices, strict=True)
    ]
    following, chosen = torch.cat(steps, dim=1).tolist()
    verdicts, first = [], 0
    for tree in trees:
        path = [0]
        while (node := following[first + path[-1]]) >= 0:
            path.append(node)
        verdicts.append(Verdict(path[1:], [chosen[first + node] for node in path]))
        first += len(tree.tokens)
    return verdicts


def next_nodes(tree: TokenTree, choice: Tensor) -> Tensor:
    """[N] the first child of each node that carries its chosen token, -1 for none."""
    rows = torch.arange(len(choice), device=choice.device)
    child = (tree.parents == rows[:, None]) & (tree.tokens == choice[:, None])  # [N, N]
    return torch.where(child.any(1), child.int().argmax(1), -1)
