"""Block verification of trees: leaves are judged first (Sun et al. 2024, for chains; 2505.12398).

A node is judged after all nodes below it. Node numbers, and the order of judgement where the
verifier refuses every node but the root:

    0 ─┬─ 1 ─── 3         3, 1, 4, 2, then 0, which is never refused
       └─ 2 ─── 4

The verdict is the path to the first accepted node. A refused child gives its mass back: its parent
continues with the residual of p, from which its next child gets a new chance.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from treespec.verify.walk import (
    Judging,
    Probabilities,
    Verdict,
    Walk,
    index_children,
    select_row_draws,
)


class RefusalStep(NamedTuple):
    """One draw at each of n nodes, whose earlier draws are refused; the last step is the nodes themselves.

    draw_weight: [n, 1] w of the draws. residual: [n, V] what the draws before them leave of w p.
    node_weight: [n, 1] w of the nodes so far.
    """

    draw_weight: Tensor
    residual: Tensor
    node_weight: Tensor


Refused: TypeAlias = Iterator[RefusalStep]


@final
@dataclass(frozen=True)
class Traversal:
    """Looks at whole subtrees. Where every draw has a node it keeps at least as much as the walk over its scheme.

    The weight w of a node is the probability to accept it where all nodes below it are refused.
    Trees of the most likely tokens are walked over `topk`.
    A draw without a node is a leaf; no token follows it. On a CPU the draws are judged one after
    another. On other devices the host waits for the shape of the tree and for the verdict.

    refusals: refuses the draws of n nodes in turn, a column at a time, the sure ones last. Given p, q [n, V], the
    draws, and w of the nodes [n, 1] at first, it yields a `RefusalStep` for each column, and one more for the nodes.
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
    ) -> Judging:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return Walk(TopK()).verify_on_device(tree, p, generator)
        return self.judge_at_once(tree, sort_certain_last(tree.drafts), p[:], generator)

    def judge(
        self, tree: TokenTree, drafts: Drafts, p: Probabilities, generator: torch.Generator
    ) -> Verdict:
        """The verdict, by a coin for each draw until one is accepted."""
        row_of = {node: row for row, node in enumerate(drafts.nodes.tolist())}
        child_of = index_children(tree)

        def verdict(node: int | None, weight: Tensor) -> Verdict | None:
            """The verdict at or below a draw; None where the draw and all nodes below it are refused.

            node: the draw's node, None if it has none. weight: [1, 1], w of the draw.
            """
            # 1. A draw without a node is a leaf.
            if node is None:
                return Verdict([], []) if sample_events(weight, generator) else None

            # 2. The children come first. Where all are refused they change the node's p and w.
            target = p[node : node + 1]
            residual = target
            row = row_of.get(node)
            if row is not None:
                draws = select_row_draws(row, drafts.draws)
                tokens = draws.tokens[0].tolist() + [-1]  # the last step is the node's own
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
        self, tree: TokenTree, drafts: Drafts, p: Tensor, generator: torch.Generator
    ) -> Judging:
        """The verdict, by w of all draws. A draw has a place among them as in `list_weight_slots`.

        p: [N, V] probabilities.
        """
        # 1. On the host: the order of judgement, and the rows of inner nodes by depth.
        place = list_weight_slots(tree, drafts)
        draws = drafts.draws.tokens
        n = len(p)
        of_nodes = drafts.nodes[:, None].expand_as(draws)
        table = (yield torch.stack([of_nodes, draws, place], -1)).tolist()
        shape = order_judgement(table)
        order = shape.order

        # 2. On the device: w of all places, from the root down, and the residuals [N, V].
        weights = p.new_zeros(n + draws.numel())
        residuals = p.clone()
        weights[0] = 1
        for inner in shape.rows_by_depth.values():
            rows = to_device(inner, p.device)
            nodes = drafts.nodes[rows]
            level = drafts.draws.select_rows(rows)
            steps = list(self.refusals(p[nodes], drafts.q[rows], level, weights[nodes, None]))
            last = steps.pop()
            weights[nodes] = last.draw_weight.squeeze(1)
            residuals[nodes] = last.residual
            of_draws = torch.cat([step.draw_weight for step in steps], 1)
            weights.scatter_reduce_(0, place[rows].flatten(), of_draws.flatten(), "amax")

        # 3. The first that is accepted; the root is in the end. Its residual has the next token. NaN
        #    logits: fall back to the root, where decode reports them.
        weights[0] = 1
        places = to_device(order, p.device)
        reached = torch.cat([weights[:1], 1 - weights[places[:-1]]]).cumprod(0)
        end = sample((weights[places] * reached)[None], generator).clamp(max=len(order) - 1)
        at = places[end].clamp(max=n - 1)
        after = sample(normalize_residual(residuals[at], p[at]), generator)

        # 4. The path down to it. No token follows a draw without a node.
        position, token = (yield torch.cat([end, after])).tolist()
        node = order[position]
        text = [token]
        if node >= n:
            node, token = shape.above[node]
            text = [token]
        path: list[int] = []
        while node:
            path.insert(0, node)
            node, token = shape.above[node]
            text.insert(0, token)
        return Verdict(path, text)


def prepend_node(child: int | None, token: int, below: Verdict) -> Verdict:
    """The verdict of an accepted draw and what is accepted below it. child: its node; None: it has none."""
    path = []
    if child is not None:
        path = [child] + below.path
    return Verdict(path, [token] + below.tokens)


@dataclass(frozen=True)
class JudgementOrder:
    """How `Traversal` goes through a tree. Places of draws are numbered as in `list_weight_slots`.

    order: the places, children before their parents, the root last. above: of each place but the root's
    its parent node and its token. rows_by_depth: the rows of inner nodes at each depth, the root's first.
    """

    order: list[int]
    above: dict[int, tuple[int, int]]
    rows_by_depth: dict[int, list[int]]


def order_judgement(table: Sequence[Sequence[Sequence[int]]]) -> JudgementOrder:
    """The order in which the draws of a tree are judged.

    table: [I, K, 3] by inner node and draw: the node, the draw's token, the draw's place. In the drawing of
    `list_weight_slots` the order is 3 8 1 4 2 0.
    """
    row_of = {draws[0][0]: row for row, draws in enumerate(table)}
    above: dict[int, tuple[int, int]] = {}
    order: list[int] = []
    rows_by_depth: defaultdict[int, list[int]] = defaultdict(list)

    def descend(place: int, depth: int) -> None:
        row = row_of.get(place)
        if row is not None:
            rows_by_depth[depth].append(row)
            for _, token, child in table[row]:
                if token >= 0 and child not in above:
                    above[child] = (place, token)
                    descend(child, depth + 1)
        order.append(place)

    descend(0, 0)
    return JudgementOrder(order, above, rows_by_depth)


def sort_certain_last(drafts: Drafts) -> Drafts:
    """The columns of each row with those of sure draws at the end."""
    sure = drafts.draws.sure
    if sure is None:
        return drafts
    return replace(drafts, draws=drafts.draws.select_columns(sure.int().argsort(stable=True)))


def refuse_in_order(p: Tensor, q: Tensor, draws: Draws, weight: Tensor) -> Refused:
    """Refusals of draws without replacement (2505.12398). On a chain this is block verification.

        root      w = 1
        child     w_c = min(1, w p/q)           p, q: the parent's distributions at the child's token
        refused   p <- norm (w p - q)+          the parent, after a child is refused
                  w <- S / (S + 1 - w)          S: the mass of (w p - q)+
                  q <- q without the child's token, normalised

    At depth 1 it is `rrs-wo`.
    """
    # 1. The mass that the earlier draws leave of q, which normalises it, and q at each draw. It is a
    #    sum, since 1 less their mass has few digits.
    at = draws.tokens.clamp(min=0)
    is_drawn = draws.tokens >= 0
    at_q = q.gather(1, at) * is_drawn
    left = mask_out(q, draws.tokens).sum(-1, keepdim=True) + at_q.flip(1).cumsum(1).flip(1)
    left = clamp_positive(left).masked_fill(~is_drawn, torch.inf)  # [n, K]; by inf, q is 0
    at_q = clamp_positive(at_q / left).masked_fill(~is_drawn, torch.inf)

    # 2. rest is w p. An absent draw has w 0 and leaves it as it is. Quotients, for rounding leaves
    #    nothing of p where it has one token and q the same.
    rest = p * weight
    columns = zip(at.split(1, dim=1), at_q.split(1, dim=1), left.split(1, dim=1), strict=True)
    for place, odds, mass in columns:
        draw_weight = (rest.gather(1, place) / odds).clamp(max=1)
        yield RefusalStep(draw_weight, rest, weight)
        rest = rest.addcdiv_(q, mass, value=-1).clamp_(min=0)
        kept = rest.sum(-1, keepdim=True)
        whole = clamp_positive(kept + (1 - weight))
        rest = rest.div_(whole)
        weight = kept / whole
    yield RefusalStep(weight, rest, weight)


def list_weight_slots(tree: TokenTree, drafts: Drafts) -> Tensor:
    """[I, K] int64: the place of each draw's weight, its node's number or a place of its own.

    Five nodes, of which 0, 1 and 2 have two draws each; draw 1 of node 2 repeats the token of
    draw 0, and draw 1 of node 1 has no node. Places from N = 5 on are numbered as the draws are:

        0 ─┬─ a: 1 ─┬─ c: 3        draws     places
           │        └─ d           a b       1 2
           └─ b: 2 ─┬─ e: 4        c d       3 8
                    └─ e           e e       4 4
    """
    tokens = drafts.draws.tokens
    is_child = tree.parents == drafts.nodes[:, None, None]
    same = is_child & (tree.tokens == tokens[..., None])  # [I, K, N]
    beyond = torch.arange(tokens.numel(), device=tokens.device).view_as(tokens) + len(tree.tokens)
    return torch.where(same.any(-1), same.int().argmax(-1), beyond)


TRAVERSAL_VERIFIER = Traversal("traversal", RRSWithoutReplacement(), refuse_in_order)
BLOCK_VERIFIER = Traversal("block", Single(), refuse_in_order)
