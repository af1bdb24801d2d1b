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

ABSENT = -1  # the token of an absent draw, and the number of its node


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
            number = ABSENT
            if token != ABSENT and above != ABSENT:
                number = self._find_child(above, token)
            numbers.append(number)

        # 2. The draws there. A model that repeats a token has two nodes that become one.
        for row, (node, tokens) in enumerate(zip(tree.nodes, tree.draws, strict=True)):
            number = numbers[node]
            if number != ABSENT:
                model_draws = self.draws[number].setdefault(model, ModelDraws(row))
                model_draws.tokens += [token for token in tokens if token != ABSENT]

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

        # 1. The draws, models taking turns.
        most = 1
        for by_model in self.draws.values():
            most = max(most, *(len(model_draws.tokens) for model_draws in by_model.values()))
        tokens = torch.full((len(nodes), most * models), ABSENT)
        for row, node in enumerate(nodes):
            for model, model_draws in self.draws[node].items():
                for number, token in enumerate(model_draws.tokens):
                    tokens[row, number * models + model] = token

        # 2. Each model's distributions, at the nodes where it has drawn.
        q = drawn[0].q.new_zeros(len(nodes), models, drawn[0].q.shape[-1])
        for model, part in enumerate(drafts):
            if part is None:
                continue
            rows = [row for row, node in enumerate(nodes) if model in self.draws[node]]
            sources = [self.draws[nodes[row]][model].row for row in rows]
            q[to_device(rows, device), model] = part.q[to_device(sources, device)]
        return Drafts(to_device(nodes, device), q, Draws(to_device(tokens, device)))


def merge_trees(trees: Sequence[TokenTree]) -> TokenTree:
    """Merges the trees of M draft models for one sequence. The host reads tokens and draws, so it waits once."""
    host_trees = copy_trees_to_host(trees)
    merger = Merger(host_trees[0].tokens[0])
    for model, tree in enumerate(host_trees):
        merger.add(model, tree)
    return merger.build_tree([tree.drafts for tree in trees], trees[0].tokens.device)


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
