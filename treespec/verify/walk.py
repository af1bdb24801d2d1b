"""The seam of verifiers, and the walk: sample the plan at a node, descend while it is a child."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from treespec.shaping.sampling import TargetDistributions, sample
from treespec.trees.tree import Draws, TokenTree
from treespec.verify.scheme import Scheme


@dataclass(frozen=True)
class Verdict:
    """What a cycle commits.

    path: the accepted nodes from the root down, without the root.
    tokens: their tokens, then one more token from the target's law.
    """

    path: list[int]
    tokens: list[int]


class Verifier(Protocol):
    """Judges a drafted tree: which path is accepted, and which token follows it.

    name: the verifier's name on the command line (`--verifier`).
    scheme: the scheme that makes the tree's draws.
    """

    @property
    def name(self) -> str: ...
    @property
    def scheme(self) -> Scheme: ...

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetDistributions, generator: torch.Generator
    ) -> Verdict:
        """p: [N, V] probabilities."""
        ...


@final
@dataclass(frozen=True)
class Walk:
    """Samples the scheme's plan at the root and moves to the child with that token, until none is.

    Of a leaf the plan is p. The walk is lossless for every lossless scheme: each output token has
    the target's law given the text before it. Where a scheme's draws are a function of the text,
    the children of a node are its draws.
    On a CPU the walk computes the plans of the nodes on its path, one after another. On other
    devices it samples the plans of all nodes at once, so that the host waits once.
    """

    scheme: Scheme

    @property
    def name(self) -> str:
        return self.scheme.name

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetDistributions, generator: torch.Generator
    ) -> Verdict:
        return (self.step_by_step if p.device.type == "cpu" else self.at_once)(tree, p, generator)

    def at_once(
        self, tree: TokenTree, p: Tensor | TargetDistributions, generator: torch.Generator
    ) -> Verdict:
        return follow(tree, sample(self.plans(tree, p), generator))

    def step_by_step(
        self, tree: TokenTree, p: Tensor | TargetDistributions, generator: torch.Generator
    ) -> Verdict:
        inner = tree.drafts.nodes.tolist() if tree.drafts else []
        row_of = {node: row for row, node in enumerate(inner)}

        def choice(node: int) -> int:
            plan = self.plan_at(tree, p, node, row_of.get(node))
            return int(sample(plan, generator))

        return follow_by_step(tree, choice)

    def plans(self, tree: TokenTree, p: Tensor | TargetDistributions) -> Tensor:
        """[N, V] the plan at every node: probabilities of the output token."""
        if tree.drafts:
            nodes = tree.drafts.nodes
            plans = self.scheme.plan(p[nodes], tree.drafts.q, tree.drafts.draws)
            return p[:].index_copy(0, nodes, plans)
        if self.scheme.lossless:
            return p[:]  # draws are a function of the text: the plan is p
        return self.scheme.plan(p[:], p[:], Draws(children_of(tree)))

    def plan_at(
        self, tree: TokenTree, p: Tensor | TargetDistributions, node: int, row: int | None
    ) -> Tensor:
        """[1, V] the plan at one node.

        row: the node's row in the tree's drafts; None: it has no draws.
        """
        law = p[node : node + 1]
        if tree.drafts and row is not None:
            draws = drawn_at(row, tree.drafts.draws)
            return self.scheme.plan(law, tree.drafts.q[row : row + 1], draws)
        if self.scheme.lossless:
            return law
        return self.scheme.plan(law, law, Draws(children_of(tree)[node : node + 1]))


def drawn_at(row: int, draws: Draws) -> Draws:
    """The draws of one row, without the columns that only other rows fill."""
    tokens = draws.tokens[row : row + 1]
    width = 1 + max((i for i, token in enumerate(tokens[0].tolist()) if token >= 0), default=0)
    return draws.each(lambda field: field[row : row + 1, :width])


def children_of(tree: TokenTree) -> Tensor:
    """[N, N] int64: row i holds the tokens of i's children, each in its own node's column.

    The example tree, whose nodes 0 to 4 carry the tokens r a b c d; a dot is -1:

        0 ─┬─ 1 ─── 3        row 0    . a b . .
           └─ 2 ─── 4        row 1    . . . c .
                             row 2    . . . . d
                             row 3    . . . . .
                             row 4    . . . . .
    """
    rows = torch.arange(len(tree.parents), device=tree.parents.device)
    return tree.tokens.where(tree.parents == rows[:, None], -1)


def children_by_token(tree: TokenTree) -> dict[tuple[int, int], int]:
    """{(node, token): the node's first child with that token}, on the host."""
    child_of: dict[tuple[int, int], int] = {}
    links = torch.stack([tree.parents, tree.tokens]).mT.tolist()
    for node, (parent, token) in enumerate(links):
        child_of.setdefault((parent, token), node)
    return child_of


def follow(tree: TokenTree, choice: Tensor) -> Verdict:
    """The path from the root along the tokens chosen at the nodes.

    choice: [N] int64, an output token for each node; at temperature 0 the target's likeliest.
    """
    return follow_all([tree], [choice])[0]


def follow_all(trees: Sequence[TokenTree], choices: Sequence[Tensor]) -> list[Verdict]:
    """`follow` in each of several trees; the host waits once."""
    steps = [
        torch.stack([next_nodes(tree, choice), choice])
        for tree, choice in zip(trees, choices, strict=True)
    ]
    next_of, chosen = torch.cat(steps, dim=1).tolist()
    verdicts = []
    first = 0  # where the tree's nodes begin
    for tree in trees:
        path = [0]
        while (node := next_of[first + path[-1]]) >= 0:
            path.append(node)
        verdicts.append(Verdict(path[1:], [chosen[first + node] for node in path]))
        first += len(tree.tokens)
    return verdicts


def follow_by_step(tree: TokenTree, choice: Callable[[int], int]) -> Verdict:
    """`follow` of tokens that are chosen when they are asked for, at the visited nodes alone.

    choice: the output token at a node.
    """
    child_of = children_by_token(tree)
    path, tokens = [0], []
    while True:
        tokens.append(choice(path[-1]))
        child = child_of.get((path[-1], tokens[-1]))
        if child is None:
            return Verdict(path[1:], tokens)
        path.append(child)


def next_nodes(tree: TokenTree, choice: Tensor) -> Tensor:
    """[N] int64: each node's first child that carries its chosen token [N], -1 for none."""
    rows = torch.arange(len(choice), device=choice.device)
    child = (tree.parents == rows[:, None]) & (tree.tokens == choice[:, None])  # [N, N]
    return torch.where(child.any(1), child.int().argmax(1), -1)
