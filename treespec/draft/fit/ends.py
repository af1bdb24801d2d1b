"""The end of a cycle, for `measure`: a tree is verified and its accepted path committed.

How long a tree of draws takes depends on the verdict. It is short where the first leaf is accepted
and long where all draws are refused. Both are measured, and their mean counts.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from treespec.draft.fit.timing import Step
from treespec.draft.grow.growth import grow_together
from treespec.draft.grow.static import grow_static
from treespec.draft.pace.times import SMALL
from treespec.draft.proposer import Frontier
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.law import Law
from treespec.shaping.sampling import SamplingParams
from treespec.trees.mask import ancestor_mask
from treespec.trees.static import balanced, chain
from treespec.trees.tree import TokenTree
from treespec.verify.auto import Auto
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.together import judge_all

SHAPES = chain(5), balanced(2, 2), balanced(2, 3)  # the second has SMALL nodes

Forward = Callable[[TokenTree], list[TreeOutput]]


def ends(forward: Forward, cache: TreeCache, tokens: Tensor, vocab_size: int) -> list[Step]:
    """Seven steps, whose seconds `rests` takes. tokens: [P], of each text and all in the cache."""
    # 1. Trees of draws from a uniform law.
    flat = Flat(tokens.new_zeros(1, vocab_size))
    sampled, greedy = SamplingParams(1), SamplingParams()
    generator = torch.Generator(device=tokens.device).manual_seed(0)
    by, root = RRSWithoutReplacement(), tokens[-1:]
    grown = [grow_static(root, flat.law, shape, by, sampled, generator) for shape in SHAPES]
    of_draws, *trees = (grow_together(flat, [growth])[0] for growth in grown)

    # 2. Ends without drafts, with one branch of the likeliest tokens, and with one of draws.
    def end(tree: TokenTree, params: SamplingParams, logits: Tensor, kept: list[int]) -> Step:
        judged = partial(finish, logits, cache, tree, params, generator, kept, len(tokens))
        return partial(forward, tree), judged

    one, six = branch(1, tokens), branch(6, tokens)
    steps = [
        end(one, sampled, forward(one)[0].logits, [0]),
        end(six, greedy, forward(six)[0].logits, [0, 2, 5]),
        end(of_draws, sampled, forward(of_draws)[0].logits, [0, 1, 2]),
    ]

    # 3. Ends of each tree with several draws a node: its tokens alone are likely, or impossible.
    for tree in trees:
        logits = forward(tree)[0].logits
        among = torch.zeros_like(logits, dtype=torch.bool).index_fill_(1, tree.tokens, True)
        for mask in (~among, among):  # a tiny vocabulary may lie in the tree as a whole
            masked = logits if mask.all() else logits.masked_fill(mask, -torch.inf)
            steps.append(end(tree, sampled, masked, [0, 1, 3]))
    return steps


def rests(seconds: Sequence[float]) -> tuple[tuple[float, float, float, float], float]:
    """`Times.rest` and `Times.judged` from the seconds of `ends`."""
    plain, likeliest, of_draws = seconds[:3]
    small, larger = (seconds[3] + seconds[4]) / 2, (seconds[5] + seconds[6]) / 2
    further = max(larger - small, 0) / (SHAPES[2].size - SMALL)
    return (plain, likeliest, of_draws, small), further


class Flat:
    """A draft model with a uniform law, at no cost. law: [1, V] logits."""

    def __init__(self, law: Tensor) -> None:
        self.law = law.float()

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        return [self.law.expand(len(frontier.tokens), -1) for frontier in frontiers if frontier]


def branch(nodes: int, tokens: Tensor) -> TokenTree:
    """A tree of one branch; a forward's time does not depend on the shape."""
    number = torch.arange(nodes, device=tokens.device)
    return TokenTree(tokens[:nodes], number - 1, number, ancestor_mask(number - 1, nodes))


def finish(
    logits: Tensor,
    cache: TreeCache,
    tree: TokenTree,
    params: SamplingParams,
    generator: torch.Generator,
    kept: list[int],
    committed: int,
) -> None:
    """Verify a tree that every text has in the cache, commit the kept nodes, and rewind.

    logits: [N, V]. committed: tokens of the cache before the tree.
    """
    texts = len(cache.lengths)
    law = Law(params)
    judge_all(Auto(), [tree] * texts, [logits] * texts, [law] * texts, [generator] * texts)
    cache.commit([kept] * texts)
    cache.rewind([committed] * texts)
