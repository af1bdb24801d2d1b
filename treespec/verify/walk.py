"""The protocol of verifiers, and the walk: sample the plan at a node, descend while a child has that token."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor

from treespec.sampling.probs import sample
from treespec.sampling.sampler import TargetDistributions
from treespec.trees.tree import Draws, TokenTree
from treespec.verify.scheme import Scheme
from treespec.verify.verdict import DeviceStep, Verdict, finish_step
from treespec.verify.verdict import Judging as Judging  # verifiers of other packages name it

Probabilities: TypeAlias = (
    Tensor | TargetDistributions
)  # [N, V] the target's at the nodes of a tree


class Verifier(Protocol):
    """Judges a drafted tree: which path is accepted, and which token follows it.

    Attributes:
        name: the verifier's name on the command line (`--verifier`).
        scheme: the scheme that makes the tree's draws.
        coupled: whether the output at a position is a function of only the target and the seed (`gumbel`), so that
            each cycle's tree may be chosen by its cost.
    """

    @property
    def name(self) -> str: ...
    @property
    def scheme(self) -> Scheme: ...
    @property
    def coupled(self) -> bool: ...

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        """Judge a tree on a CPU. p: [N, V] probabilities of the target."""
        ...

    def verify_on_device(
        self, tree: TokenTree, p: Probabilities, generator: torch.Generator
    ) -> DeviceStep:
        """Judge a tree on another device: return a step, so that all sequences of a batch share their waits.

        `numbers` and `finish` of the step as in `DeviceStep`. A generator function does too (`Judging`).
        """
        ...


@final
@dataclass(frozen=True)
class Walk:
    """Samples the scheme's plan at the root and moves to the child with that token, until no child has it.

    At a leaf the plan is p. The walk is lossless for every lossless scheme: each output token has
    the target's distribution given the text before it. If a scheme's draws are a function of the text,
    the children of a node are its draws.
    On a CPU the walk computes only the plans of the nodes on its path, one after another. On other
    devices it samples the plans of all nodes at once, which costs one sync. `walk_chosen_path` draws a walk.

    Attributes:
        scheme: plans the output token at each node.
        known_as: the verifier's name; "": the scheme's name.
        coupled: as `Verifier.coupled`.
    """

    scheme: Scheme
    known_as: str = ""
    coupled: bool = False

    @property
    def name(self) -> str:
        if self.known_as:
            return self.known_as
        return self.scheme.name

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        if p.device.type == "cpu":
            return self.verify_on_host(tree, p, generator)
        return finish_step(self.verify_on_device(tree, p, generator))

    def verify_on_device(
        self, tree: TokenTree, p: Probabilities, generator: torch.Generator
    ) -> DeviceStep:
        outputs = sample(self.plan_all_nodes(tree, p), generator)
        return follow_outputs(tree, outputs)

    def verify_on_host(
        self, tree: TokenTree, p: Probabilities, generator: torch.Generator
    ) -> Verdict:
        drafts = tree.drafts
        row_of: dict[int, int] = {}
        if drafts:
            row_of = {node: row for row, node in enumerate(drafts.nodes.tolist())}

        def choice(node: int) -> int:
            here = slice(node, node + 1)
            if not drafts or node not in row_of:
                plan = self.plan_without_draws(tree, p, here)
            else:
                row = row_of[node]
                draws = select_row_draws(row, drafts.draws)
                plan = self.scheme.plan(p[here], drafts.q[row : row + 1], draws)
            return int(sample(plan, generator))

        return walk_chosen_path(index_children(tree), choice)

    def plan_all_nodes(self, tree: TokenTree, p: Probabilities) -> Tensor:
        """Return [N, V] the plan at every node: probabilities of the output token."""
        plans = self.plan_without_draws(tree, p, slice(None))
        drafts = tree.drafts
        if not drafts:
            return plans
        draw_plans = self.scheme.plan(p[drafts.nodes], drafts.q, drafts.draws)
        return plans.index_copy(0, drafts.nodes, draw_plans)

    def plan_without_draws(self, tree: TokenTree, p: Probabilities, nodes: slice) -> Tensor:
        """Return [n, V] the plans at nodes whose children were chosen deterministically (top-k, retrieval)."""
        target = p[nodes]
        if self.scheme.lossless:
            return target
        return self.scheme.plan(target, target, Draws(build_child_table(tree)[nodes]))


def is_walk(verifier: Verifier) -> bool:
    """Whether a verifier is a `Walk`: it goes from node to node by its scheme's plans."""
    return isinstance(verifier, Walk)


def is_walk_of_most_likely(verifier: Verifier) -> bool:
    """Whether a verifier walks down trees of the most likely tokens by samples of p, as `topk` does."""
    scheme = verifier.scheme
    if verifier.coupled or not scheme.lossless:
        return False
    return is_walk(verifier) and scheme.takes_most_likely


def select_row_draws(row: int, draws: Draws) -> Draws:
    """Select the draws of one row, without the columns that only other rows fill."""
    tokens = draws.tokens[row : row + 1]
    width = 1 + max((i for i, token in enumerate(tokens[0].tolist()) if token >= 0), default=0)
    return draws.apply_to_fields(lambda field: field[row : row + 1, :width])


def build_child_table(tree: TokenTree) -> Tensor:
    """Return [N, N] int64: row i holds the tokens of i's children, each in the column of the child.

    The example tree, whose nodes 0 to 4 carry the tokens r a b c d; a dot is -1:

        0 ─┬─ 1 ─── 3        row 0    . a b . .
           └─ 2 ─── 4        row 1    . . . c .
                             row 2    . . . . d
                             row 3    . . . . .
                             row 4    . . . . .
    """
    rows = torch.arange(len(tree.parents), device=tree.parents.device)
    return tree.tokens.where(tree.parents == rows[:, None], -1)


def index_children(tree: TokenTree) -> dict[tuple[int, int], int]:
    """Return {(node, token): the node's first child with that token}. It reads the tree on the host."""
    return index_links(torch.stack([tree.parents, tree.tokens]).mT.tolist())


def index_links(links: Iterable[Sequence[int]]) -> dict[tuple[int, int], int]:
    """As `index_children`, from the (parent, token) of each node."""
    child_of: dict[tuple[int, int], int] = {}
    for node, link in enumerate(links):
        parent = link[0]
        token = link[1]
        child_of.setdefault((parent, token), node)
    return child_of


def follow_outputs(tree: TokenTree, outputs: Tensor) -> DeviceStep:
    """Follow the outputs from the root down, once the host has the tree.

    outputs: [N] int64, the output token at each node; at temperature 0 the target's most likely one.
    """
    return DeviceStep(torch.stack([tree.parents, tree.tokens, outputs]), walk_outputs)


def walk_outputs(table: Tensor) -> Verdict:
    """Walk down a tree by its outputs. table: [3, N] the parents, tokens and outputs of the nodes, on the host."""
    parents, tokens, outputs = table.tolist()
    return walk_chosen_path(index_links(zip(parents, tokens, strict=True)), outputs.__getitem__)


def walk_chosen_path(child_of: dict[tuple[int, int], int], choice: Callable[[int], int]) -> Verdict:
    """Walk down from the root, and call `choice(node)` at each visited node for its output token.

    The path goes on while a child carries that token. Outputs b at node 0, d at node 2 and x at node 4:

        0 r ─┬─ 1 a ── 3 c        path      2 4
             └─ 2 b ── 4 d        tokens    b d x

    child_of: as `index_children`.
    """
    path = [0]
    tokens = []
    while True:
        tokens.append(choice(path[-1]))
        child = child_of.get((path[-1], tokens[-1]))
        if child is None:
            return Verdict(path[1:], tokens)
        path.append(child)
