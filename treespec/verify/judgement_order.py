"""The order in which block verification judges the draws of a tree, and the slots of their weights."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.verdict import Verdict


def list_weight_slots(tree: TokenTree, drafts: Drafts) -> Tensor:
    """Return [I, K] int64 the slot of each draw's weight: its node's number, or N + its index if it has no node.

    Five nodes; 0, 1 and 2 have two draws each. Draw 1 of node 2 repeats the token of
    draw 0, and draw 1 of node 1 has no node. Slots from N = 5 on are numbered by draw:

        0 ─┬─ a: 1 ─┬─ c: 3        draws     slots
           │        └─ d           a b       1 2
           └─ b: 2 ─┬─ e: 4        c d       3 8
                    └─ e           e e       4 4
    """
    tokens = drafts.draws.tokens
    is_child = tree.parents == drafts.nodes[:, None, None]
    is_node = is_child & (tree.tokens == tokens[..., None])  # [I, K, N]
    own_slots = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens) + len(
        tree.tokens
    )
    return torch.where(is_node.any(-1), is_node.int().argmax(-1), own_slots)


@dataclass(frozen=True)
class JudgementOrder:
    """How `Traversal` goes through a tree. Draws have slots as in `list_weight_slots`.

    Attributes:
        order: the slots, children before their parents, the root last.
        above: {slot: (parent node, token)}, without the root.
        rows_by_depth: {depth: rows of inner nodes}, the root's first.
    """

    order: list[int]
    above: dict[int, tuple[int, int]]
    rows_by_depth: dict[int, list[int]]

    def build_verdict(self, nodes: int, end_and_token: Tensor) -> Verdict:
        """Build the verdict that ends at an accepted slot: the path down to it.

        No token follows a draw without a node, whose slot is no node's number.

        Args:
            nodes: of the tree.
            end_and_token: [2] the position of the slot in `order`, and the token that follows it; on the host.
        """
        position, token = end_and_token.tolist()
        slot = self.order[position]
        path: list[int] = []
        tokens: list[int] = []
        if slot < nodes:
            tokens = [token]
        while slot:
            if slot < nodes:
                path.append(slot)
            slot, token = self.above[slot]
            tokens.append(token)
        return Verdict(path[::-1], tokens[::-1])


def order_judgement(table: Sequence[Sequence[Sequence[int]]]) -> JudgementOrder:
    """Find the order in which the draws of a tree are judged.

    table: [I, K, 3] by inner node and draw: the node, the draw's token, the draw's slot. In the drawing of
    `list_weight_slots` the order is 3 8 1 4 2 0.
    """
    row_of = {draws[0][0]: row for row, draws in enumerate(table)}
    above: dict[int, tuple[int, int]] = {}
    order: list[int] = []
    rows_by_depth: defaultdict[int, list[int]] = defaultdict(list)

    def descend(slot: int, depth: int) -> None:
        row = row_of.get(slot)
        if row is not None:
            rows_by_depth[depth].append(row)
            for _, token, child in table[row]:
                if token >= 0 and child not in above:
                    above[child] = (slot, token)
                    descend(child, depth + 1)
        order.append(slot)

    descend(0, 0)
    return JudgementOrder(order, above, rows_by_depth)
