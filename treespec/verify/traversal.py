"""Block verification of trees: leaves are judged first (Sun et al. 2024, for chains; 2505.12398).

A node is judged after all nodes below it. Node numbers, and the order of judgement if the
verifier refuses every node but the root:

    0 ─┬─ 1 ─── 3         3, 1, 4, 2, then 0, which is never refused
       └─ 2 ─── 4

The verdict is the path to the first accepted node. When a child is refused, its parent continues with the residual
of p, against which the next child is judged.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from treespec.sampling.probs import sample, sample_events
from treespec.trees.tree import Drafts, Draws, TokenTree, to_device
from treespec.verify.distributions import clamp_positive, mask_out, normalize_residual
from treespec.verify.rrs import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.topk import TopK
from treespec.verify.verdict import DeviceStep, Verdict
from treespec.verify.walk import Probabilities, Walk, index_children, select_row_draws


class RefusalStep(NamedTuple):
    """One draw at each of n nodes, after their earlier draws are refused; the last step is the nodes themselves.

    Attributes:
        draw_weight: [n, 1] w of the draws.
        residual: [n, V] w p without the mass of the refused draws.
        node_weight: [n, 1] w of the nodes so far.
    """

    draw_weight: Tensor
    residual: Tensor
    node_weight: Tensor


Refused: TypeAlias = Iterator[RefusalStep]


@final
@dataclass(frozen=True)
class Traversal:
    """Verifies whole subtrees. If every draw has a node it keeps at least as much as the walk over its scheme.

    The weight w of a node is the probability to accept it if all nodes below it are refused.
    Trees of the most likely tokens are walked over `topk`.
    Draws without a node count as leaves; no token follows them. On a CPU the draws are judged one after
    another. On other devices there are two syncs: for the shape of the tree and for the verdict.

    Attributes:
        name: on the command line.
        scheme: makes the tree's draws.
        refusals: refuses the draws of n nodes in turn, a column at a time, the sure ones last. Given p, q [n, V], the
            draws, and w of the nodes [n, 1] at first, it yields a `RefusalStep` for each column, and one for the nodes.
    """

    name: str
    scheme: Scheme
    refusals: Callable[[Tensor, Tensor, Draws, Tensor], Refused]
    coupled = False

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return Walk(TopK())(tree, p, generator)
        return self.judge(tree, sort_certain_last(tree.drafts), p, generator)

    def verify_on_device(
        self, tree: TokenTree, p: Probabilities, generator: torch.Generator
    ) -> DeviceStep:
        """Judge all draws at once. The first step brings the tree's shape to the host, the second the verdict.

        p: [N, V] probabilities.
        """
        if tree.drafts is None:
            return Walk(TopK()).verify_on_device(tree, p, generator)
        drafts = sort_certain_last(tree.drafts)
        slots = list_weight_slots(tree, drafts)
        draws = drafts.draws.tokens
        table = torch.stack([drafts.nodes[:, None].expand_as(draws), draws, slots], -1)
        return DeviceStep(table, partial(self.judge_at_once, drafts, slots, p[:], generator))

    def judge(
        self, tree: TokenTree, drafts: Drafts, p: Probabilities, generator: torch.Generator
    ) -> Verdict:
        """Judge the draws one by one, with a random number for each, until one is accepted.

        Args:
            tree: its nodes.
            drafts: its draws, sure ones last.
            p: [N, V] probabilities at the nodes; only visited rows are read.
            generator: of the random numbers.
        """
        row_of = {node: row for row, node in enumerate(drafts.nodes.tolist())}
        child_of = index_children(tree)

        def verdict(node: int | None, weight: Tensor) -> Verdict | None:
            """Judge a draw and all nodes below it. Returns None if all are refused.

            node: the draw's node, None for a draw without a node. weight: [1, 1], w of the draw.
            """
            # 1. A draw without a node is a leaf.
            if node is None:
                return Verdict([], []) if sample_events(weight, generator) else None

            # 2. The children come first. If all are refused, the node's p and w change.
            target = p[node : node + 1]
            residual = target
            row = row_of.get(node)
            if row is not None:
                draws = select_row_draws(row, drafts.draws)
                tokens = draws.tokens[0].tolist() + [-1]  # the last step is the node itself
                steps = self.refusals(target, drafts.q[row : row + 1], draws, weight)
                for token, step in zip(tokens, steps, strict=True):
                    residual = step.residual
                    weight = step.node_weight
                    if token < 0 or not step.draw_weight.any():
                        continue
                    child = child_of.get((node, token))
                    below = verdict(child, step.draw_weight)
                    if below:
                        return prepend_node(child, token, below)
                residual = normalize_residual(residual, target)

            # 3. Then the node itself, with a token from its residual. The root is never refused.
            if node and not sample_events(weight, generator):
                return None
            return Verdict([], sample(residual, generator).tolist())

        answer = verdict(0, torch.ones_like(drafts.q[:1, :1]))
        assert answer
        return answer

    def judge_at_once(
        self,
        drafts: Drafts,
        slots: Tensor,
        p: Tensor,
        generator: torch.Generator,
        table: Tensor,
    ) -> DeviceStep:
        """Compute w of all draws, then sample the verdict. Draws have slots as in `list_weight_slots`.

        Args:
            drafts: the tree's draws, sure ones last.
            slots: [I, K] int64 of the draws.
            p: [N, V] probabilities at the nodes.
            generator: samples the verdict and the next token.
            table: as `order_judgement`, on the host.
        """
        # 1. The order of judgement, w of all slots and the residuals.
        shape = order_judgement(table.tolist())
        weighed = self.weigh_draws(drafts, slots, p, shape)
        weights = weighed.weights

        # 2. The first accepted slot; the root is the last one, and is always accepted. The next token is sampled
        #    from its residual. NaN logits: fall back to the root; decode reports them.
        slot_order = to_device(shape.order, p.device)
        reached = torch.cat([weights[:1], 1 - weights[slot_order[:-1]]]).cumprod(0)
        end = sample((weights[slot_order] * reached)[None], generator)
        end = end.clamp(max=len(shape.order) - 1)
        node = slot_order[end].clamp(max=len(p) - 1)
        after = sample(normalize_residual(weighed.residuals[node], p[node]), generator)
        return DeviceStep(torch.cat([end, after]), partial(shape.build_verdict, len(p)))

    def weigh_draws(
        self, drafts: Drafts, slots: Tensor, p: Tensor, shape: "JudgementOrder"
    ) -> "WeighedDraws":
        """Compute w of all draws and the residuals of the nodes, from the root down, a level at a time.

        drafts, slots, p: as in `judge_at_once`. shape: of the tree.
        """
        weights = p.new_zeros(len(p) + slots.numel())
        residuals = p.clone()
        weights[0] = 1
        for inner_rows in shape.rows_by_depth.values():
            rows = to_device(inner_rows, p.device)
            nodes = drafts.nodes[rows]
            level = drafts.draws.select_rows(rows)
            steps = list(self.refusals(p[nodes], drafts.q[rows], level, weights[nodes, None]))
            node_step = steps.pop()
            weights[nodes] = node_step.draw_weight.squeeze(1)
            residuals[nodes] = node_step.residual
            draw_weights = torch.cat([step.draw_weight for step in steps], 1)
            weights.scatter_reduce_(0, slots[rows].flatten(), draw_weights.flatten(), "amax")
        weights[0] = 1
        return WeighedDraws(weights, residuals)


def prepend_node(child: int | None, token: int, below: Verdict) -> Verdict:
    """Put an accepted draw before the verdict below it. child: the draw's node; None: a draw without a node."""
    path = []
    if child is not None:
        path = [child] + below.path
    return Verdict(path, [token] + below.tokens)


class WeighedDraws(NamedTuple):
    """What `Traversal` computes of a tree at once.

    Attributes:
        weights: [N + I K] w of the slots; the root's is 1.
        residuals: [N, V] of p at the nodes, after all their draws are refused.
    """

    weights: Tensor
    residuals: Tensor


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


def sort_certain_last(drafts: Drafts) -> Drafts:
    """Move the columns of sure draws to the end of each row."""
    sure = drafts.draws.sure
    if sure is None:
        return drafts
    return replace(drafts, draws=drafts.draws.select_columns(sure.int().argsort(stable=True)))


def refuse_in_order(p: Tensor, q: Tensor, draws: Draws, weight: Tensor) -> Refused:
    """Refuse draws without replacement in turn (2505.12398). On a chain this is block verification.

        root      w = 1
        child     w_c = min(1, w p/q)           p, q: the parent's distributions at the child's token
        refused   p <- norm (w p - q)+          the parent, after a child is refused
                  w <- S / (S + 1 - w)          S: the mass of (w p - q)+
                  q <- q without the child's token, normalised

    In a tree of depth 1 this is `rrs-wo`.

    Args:
        p, q: [n, V] probabilities of the target and of the draft.
        draws: of the nodes.
        weight: [n, 1] w of the nodes.

    Yields: a `RefusalStep` for each column of draws, and one for the nodes.
    """
    # 1. The mass of q without the earlier draws, which normalises it, and q at each draw. The mass is a
    #    sum of small numbers: 1 minus the mass of the draws would lose digits.
    token_index = draws.tokens.clamp(min=0)
    is_drawn = draws.tokens >= 0
    draw_probs = q.gather(1, token_index) * is_drawn
    remaining_mass = mask_out(q, draws.tokens).sum(-1, keepdim=True) + draw_probs.flip(1).cumsum(
        1
    ).flip(1)
    remaining_mass = clamp_positive(remaining_mass).masked_fill(
        ~is_drawn, torch.inf
    )  # [n, K]; by inf, q is 0
    draw_probs = clamp_positive(draw_probs / remaining_mass).masked_fill(~is_drawn, torch.inf)

    # 2. The residual starts as w p. An absent draw has w 0 and does not change it. We divide by the total
    #    because rounding can leave no mass if p and q are the same one-hot row.
    residual = p * weight
    columns = zip(
        token_index.split(1, dim=1),
        draw_probs.split(1, dim=1),
        remaining_mass.split(1, dim=1),
        strict=True,
    )
    for index, draw_prob, mass in columns:
        draw_weight = (residual.gather(1, index) / draw_prob).clamp(max=1)
        yield RefusalStep(draw_weight, residual, weight)
        residual = residual.addcdiv_(q, mass, value=-1).clamp_(min=0)
        residual_mass = residual.sum(-1, keepdim=True)
        total = clamp_positive(residual_mass + (1 - weight))
        residual = residual.div_(total)
        weight = residual_mass / total
    yield RefusalStep(weight, residual, weight)


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


TRAVERSAL_VERIFIER = Traversal("traversal", RRSWithoutReplacement(), refuse_in_order)
BLOCK_VERIFIER = Traversal("block", Single(), refuse_in_order)
