"""Merges the trees of several draft models by token prefix (SpecInfer, Miao et al. 2024, 2305.09781, section 3).

Two trees below the root r. Equal paths become one node, with the draws of both models:

    model 0   r ─┬─ a ── c        model 1   r ─── a ── d        merged   r ─┬─ a ─┬─ c
                 └─ b                                                       │     └─ d
                                                                            └─ b

    draws     at r   a b          at r   a                      at r   a a b -      models take turns: 0 1 0 1
              at a   c            at a   d                      at a   c d
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treespec.trees.mask import mark_ancestors
from treespec.trees.tree import Drafts, Draws, TokenTree, to_device, to_host

ABSENT_DRAW = -1  # the token of an absent draw, and the number of its node


@dataclass
class HostTree:
    """A tree on the host: tokens and parents of its N nodes, and the draws at its inner nodes.

    Attributes:
        nodes: the inner nodes.
        draws: at each inner node, the tokens drawn there.
    """

    tokens: list[int]
    parents: list[int]
    nodes: list[int] = field(default_factory=list)
    draws: list[list[int]] = field(default_factory=list)


@dataclass
class ModelDraws:
    """The draws of one model at a node of the merged tree. row: of the model's draft distributions there."""

    row: int
    tokens: list[int] = field(default_factory=list)


class Merger:
    """Merges the trees of M models, one after the other.

    Attributes:
        tokens, parents, depths: of the merged nodes.
        draws: by merged node and model.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.children: dict[tuple[int, int], int] = {}
        self.draws: defaultdict[int, dict[int, ModelDraws]] = defaultdict(dict)

    def add(self, model: int, tree: HostTree) -> None:
        """Adds a model's tree. A node whose draw is absent, and all below it, are left out."""
        # 1. The merged number of each node.
        numbers = [0]
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            above = numbers[parent]
            number = ABSENT_DRAW
            if token != ABSENT_DRAW and above != ABSENT_DRAW:
                number = self._find_child(above, token)
            numbers.append(number)

        # 2. The draws there. A model that repeats a token has two nodes that become one.
        for row, (node, tokens) in enumerate(zip(tree.nodes, tree.draws, strict=True)):
            number = numbers[node]
            if number != ABSENT_DRAW:
                model_draws = self.draws[number].setdefault(model, ModelDraws(row))
                model_draws.tokens += [token for token in tokens if token != ABSENT_DRAW]

    def _find_child(self, parent: int, token: int) -> int:
        """Returns the merged child of a node with that token; it is made if there is none."""
        number = self.children.setdefault((parent, token), len(self.tokens))
        if number == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
        return number

    def build_tree(self, drafts: Sequence[Drafts | None], device: torch.device) -> TokenTree:
        """Builds the merged tree. drafts: of each model; None: it drew nothing."""
        return TokenTree(
            to_device(self.tokens, device),
            to_device(self.parents, device),
            to_device(self.depths, device),
            to_device(mark_ancestors(self.parents), device),
            self._merge_drafts(drafts),
        )

    def _merge_drafts(self, drafts: Sequence[Drafts | None]) -> Drafts | None:
        """Merges distributions and draws; None without draws. drafts: as for `build_tree`."""
        drawn = [part for part in drafts if part is not None]
        if not drawn:
            return None
        models = len(drafts)
        device = drawn[0].q.device
        nodes = sorted(self.draws)
        q = drawn[0].q.new_zeros(len(nodes), models, drawn[0].q.shape[-1])
        for model, part in enumerate(drafts):
            if part is not None:
                rows, sources = self._list_rows(nodes, model)
                q[to_device(rows, device), model] = part.q[to_device(sources, device)]
        tokens = self._build_draw_table(nodes, models)
        return Drafts(to_device(nodes, device), q, Draws(to_device(tokens, device)))

    def _list_rows(self, nodes: Sequence[int], model: int) -> tuple[list[int], list[int]]:
        """Lists the rows of `nodes` at which a model has drawn, and the rows of its own distributions there."""
        rows = []
        sources = []
        for row, node in enumerate(nodes):
            model_draws = self.draws[node].get(model)
            if model_draws:
                rows.append(row)
                sources.append(model_draws.row)
        return rows, sources

    def _build_draw_table(self, nodes: Sequence[int], models: int) -> Tensor:
        """Builds [I, K] the draws at these nodes, the models taking turns; K is a multiple of M."""
        turns = 1
        for node in nodes:
            for model_draws in self.draws[node].values():
                turns = max(turns, len(model_draws.tokens))
        table = torch.full(
            (len(nodes), turns * models), ABSENT_DRAW, dtype=torch.int64, device="cpu"
        )
        for row, node in enumerate(nodes):
            for model, model_draws in self.draws[node].items():
                drawn = torch.tensor(model_draws.tokens, dtype=torch.int64, device="cpu")
                table[row, model : models * len(drawn) : models] = drawn
        return table


def merge_trees(trees_by_model: Sequence[Sequence[TokenTree]]) -> list[TokenTree]:
    """Merges the trees of M draft models for each of B sequences. The host reads tokens and draws, so it waits once.

    trees_by_model: B trees of each model.
    """
    models = len(trees_by_model)
    trees: list[TokenTree] = []
    for row in zip(*trees_by_model, strict=True):
        trees += row
    host_trees = copy_trees_to_host(trees)
    merged_trees = []
    for first in range(0, len(trees), models):
        merger = Merger(host_trees[first].tokens[0])
        for model in range(models):
            merger.add(model, host_trees[first + model])
        drafts = [tree.drafts for tree in trees[first : first + models]]
        merged_trees.append(merger.build_tree(drafts, trees[first].tokens.device))
    return merged_trees


def copy_trees_to_host(trees: Sequence[TokenTree]) -> list[HostTree]:
    """Copies trees to the host in one copy."""
    # 1. What to copy: two tensors of a tree without draws, four of one with draws.
    tensors: list[Tensor] = []
    for tree in trees:
        tensors += [tree.tokens, tree.parents]
        if tree.drafts:
            tensors += [tree.drafts.nodes, tree.drafts.draws.tokens]

    # 2. The copies.
    copies = iter(to_host(tensors))
    host_trees = []
    for tree in trees:
        host_tree = HostTree(next(copies).tolist(), next(copies).tolist())
        if tree.drafts:
            host_tree.nodes = next(copies).tolist()
            host_tree.draws = next(copies).tolist()
        host_trees.append(host_tree)
    return host_trees
