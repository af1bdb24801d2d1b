"""Block verification of trees: leaves are judged first (Sun et al. 2024, for chains; 2505.12398).

A node is judged after all nodes below it. Node numbers, and the order of judgement if the
verifier refuses every node but the root:

    0 ─┬─ 1 ─── 3         3, 1, 4, 2, then 0, which is never refused
       └─ 2 ─── 4

The verdict is the path to the first accepted node. When a child is refused, its parent continues with the residual
of p, against which the next child is judged.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor

from treespec.sampling.probs import sample, sample_events
from treespec.trees.tree import Drafts, Draws, TokenTree, to_device
from treespec.verify.distributions import normalize_residual
from treespec.verify.judgement_order import JudgementOrder, list_weight_slots, order_judgement
from treespec.verify.refusals import Refused, refuse_in_order
from treespec.verify.rrs import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.single import Single
from treespec.verify.topk import TopK
from treespec.verify.verdict import DeviceStep, Verdict
from treespec.verify.walk import Probabilities, Walk, index_children, select_row_draws


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
        self, drafts: Drafts, slots: Tensor, p: Tensor, shape: JudgementOrder
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


def sort_certain_last(drafts: Drafts) -> Drafts:
    """Move the columns of sure draws to the end of each row."""
    sure = drafts.draws.sure
    if sure is None:
        return drafts
    return replace(drafts, draws=drafts.draws.select_columns(sure.int().argsort(stable=True)))


TRAVERSAL_VERIFIER = Traversal("traversal", RRSWithoutReplacement(), refuse_in_order)
BLOCK_VERIFIER = Traversal("block", Single(), refuse_in_order)
