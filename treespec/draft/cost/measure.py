"""Measure what a cycle costs (`Cost`) with the decoding code itself: once for a machine and a pair of models."""

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.draft.cost.model import Cost, CostBy, measured_batch
from treespec.draft.cost.timing import FEWEST, ROUNDS, Step, fast_times, kept_costs
from treespec.draft.drafter import Frontier, Proposer
from treespec.draft.grow.builder import Ranked, TreeBuilder, grow_ranked
from treespec.draft.grow.growth import Growing, Growth, grow_together
from treespec.model.cache import TreeCache
from treespec.model.target import Target, TreeOutput
from treespec.shaping.distribution import Distribution
from treespec.shaping.sampling import SamplingParams
from treespec.trees.mask import ancestor_mask
from treespec.trees.static import StaticTree, balanced
from treespec.trees.tree import TokenTree
from treespec.verify.rrs import RRSWithoutReplacement
from treespec.verify.traversal import Auto
from treespec.verify.walk import judge_all

log = logging.getLogger(__name__)

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NODES_TOGETHER = (1, 2, 4, 8, 16, 32)  # of each of several sequences
CONTEXT, WAITING = 192, 3  # tokens before the tree, and tokens that the last cycle committed
DEEP = 5  # levels, at most
DEAR = 6  # one-token forwards: measure no tree larger than the first that costs this much
TOGETHER = 4, 2  # rounds, and the fewest, of several sequences: their forwards are dear
SMALLER, LARGER = balanced(2, 2), balanced(2, 3)  # the first has SMALL nodes

Forward = Callable[[TokenTree], list[TreeOutput]]
Trees = Callable[
    [Tensor, Tensor], Growing[Any]
]  # the growth from a root [1] and draft logits [1, V]


def measured_costs(
    target: Target, proposer: Proposer | None, given: Cost | CostBy | None = None
) -> CostBy:
    """The cost by batch size; measured when first asked for.

    proposer: None measures the target alone. given: take these, whatever the batch.
    """
    if isinstance(given, Cost):
        return lambda batch: given
    measured = lru_cache(None)(lambda batch: cost_for(target, proposer, batch=batch))
    return given or (lambda batch: measured(measured_batch(batch)))


def measure_up_to(batch: int, costs: CostBy) -> None:
    """Measure for each size that a batch may shrink to."""
    for size in sorted({measured_batch(size) for size in range(1, batch + 1)}):
        costs(size)


def cost_for(
    target: Target, proposer: Proposer | None, folder: Path | None = None, batch: int = 1
) -> Cost:
    """The cost from the cache folder, or measured now, which takes a few seconds."""

    def measured() -> dict[str, Cost]:
        if batch > 1:
            log.warning("measuring cycles of %d texts, once for this machine and model", batch)
        return {"cost": measure(target, proposer, batch)}

    about = dependencies(target, proposer, batch)
    return kept_costs("times", ["cost"], about, measured, folder)["cost"]


def dependencies(target: Target, proposer: Proposer | None, batch: int = 1) -> list[object]:
    """All that the cost depends on besides the processor, threads and torch."""
    device = target.output_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    models = [target.layers, target.config.to_json_string(), proposer and proposer.identity]
    return [str(device), name, str(target.dtype), models, batch]


@torch.inference_mode()
def measure(
    target: Target, proposer: Proposer | None, batch: int = 1, context: int = CONTEXT
) -> Cost:
    """proposer: None leaves the drafts at 0. context: tokens before the tree."""
    # 1. Equal sequences, in the target's cache and observed by the proposer.
    # The context may exceed the target's context length.
    ids = torch.arange(max(context, NODES[-1]), device=target.output_device) % target.vocab_size
    tokens = ids[:context]
    cache = target.new_cache(context + (320 if batch == 1 else NODES_TOGETHER[-1]))
    features = target.prefill(cache, tokens[None], proposer.taps if proposer else ())[0]
    cache.select([0] * batch)

    def forward(tree: TokenTree) -> list[TreeOutput]:
        return target.forward_trees(cache, [tree] * batch)

    # 2. Drafts: one level and DEEP levels of the most likely tokens, and two trees of draws.
    alone, most = batch == 1, (proposer and proposer.max_depth) or DEEP
    deep, shapes = min(DEEP, most), (SMALLER.cut(most), LARGER.cut(most))
    # The time of a forward over several sequences depends little on what lies in the caches.
    before = partial(forward, branch(4, tokens)) if alone else lambda: None
    drafting: list[Step] = []
    if proposer:
        proposers = [proposer.new() for _ in range(batch)]
        for new in proposers:
            new.observe([features[:-1]], [tokens])
        proposers[0].join(proposers[1:])
        trees = [by_level(1), by_level(deep), *map(drawn, shapes)]
        draft = partial(drafts, proposers[0], cache, features, tokens)
        drafting = [(before, partial(draft, grow)) for grow in trees]

    # 3. Forwards over growing numbers of nodes, up to the first that is too dear; then the ends.
    nodes = affordable(forward, ids, alone)
    earlier = drafting[1][1] if drafting and alone else before
    steps: list[Step] = [
        (before if n == 1 else earlier, partial(forward, branch(n, ids))) for n in nodes
    ]
    steps += [*ends(forward, cache, tokens, target.vocab_size, shapes), *drafting]

    # 4. Time them all.
    rounds, fewest = (ROUNDS, FEWEST) if alone else TOGETHER
    seconds = fast_times(steps, target.output_device, rounds, fewest)
    end, rest = seconds[len(nodes) :][:6], seconds[len(nodes) + 6 :] or [0.0] * 4
    return cost_from(nodes, seconds[: len(nodes)], end, rest, (deep, *shapes))


def cost_from(
    nodes: tuple[int, ...],
    forward: Sequence[float],
    ends: Sequence[float],
    drafts: Sequence[float],
    trees: tuple[int, StaticTree, StaticTree],
) -> Cost:
    """The cost by the seconds of the steps of `measure`.

    forward: over each of `nodes`. ends: of one token, of the most likely tokens, and of both shapes'
    best and worst verdicts. drafts: of one level and of several, and of both shapes. trees: the number
    of these levels, and the shapes.
    """
    # 1. Levels.
    plain, one_hot, *verdicts = ends
    levels, *shapes = trees
    level = max(drafts[1] - drafts[0], 0.0) / max(levels - 1, 1)
    begin = max(drafts[0] - level, 0.0)

    # 2. Draws beyond them. The mean of the best and the worst verdict counts.
    small, large = (
        sum(verdicts[2 * i : 2 * i + 2]) / 2
        + max(drafts[2 + i] - begin - level * shape.max_depth, 0.0)
        for i, shape in enumerate(shapes)
    )
    further = max(large - small, 0.0) / max(shapes[1].size - shapes[0].size, 1)
    overhead = max(one_hot - plain, 0.0), max(small - plain, 0.0)
    line = tuple(seconds + plain for seconds in forward)
    return Cost(nodes, line, level, begin, overhead, further)


def affordable(forward: Forward, tokens: Tensor, alone: bool) -> tuple[int, ...]:
    """The sizes up to the first whose forward costs DEAR one-node forwards."""
    seconds: list[float] = []
    sizes, least = (NODES, 4) if alone else (NODES_TOGETHER, 2)
    for n in sizes:
        act = partial(forward, branch(n, tokens))
        seconds += fast_times([(act if alone else lambda: None, act)], tokens.device, rounds=2)
        if len(seconds) > least and seconds[-1] > DEAR * seconds[0]:
            break
    return sizes[: len(seconds)]


def drafts(
    proposer: Proposer, cache: TreeCache, features: Tensor, tokens: Tensor, grow: Trees
) -> None:
    """Draft a tree for each sequence after observing a few new tokens."""
    batch = len(cache.lengths)
    proposer.rewind([len(tokens) - 1 - WAITING] * batch)
    proposer.observe([features[-1 - WAITING : -1]] * batch, [tokens[-1 - WAITING :]] * batch)
    begun = proposer.begin(tokens[-1:].expand(batch), cache)
    growths = [grow(tokens[-1:], logits) for logits in begun if logits is not None]
    grow_together(proposer.extend, growths)


def by_level(depth: int) -> Trees:
    """A chain of the most likely tokens, chosen level by level."""
    by = Ranked(depth, topk=10, nodes=depth + 1, expanded=1)
    return lambda root, logits: grow_ranked(root, logits, by)


def drawn(shape: StaticTree) -> Trees:
    """A tree of draws."""
    builder = TreeBuilder(shape, RRSWithoutReplacement())

    def grow(root: Tensor, logits: Tensor) -> Growth:
        generator = torch.Generator(device=logits.device).manual_seed(0)
        return builder.grow(root, logits, SamplingParams(1.0), generator)

    return grow


def ends(
    forward: Forward,
    cache: TreeCache,
    tokens: Tensor,
    vocab_size: int,
    shapes: Sequence[StaticTree],
) -> list[Step]:
    """The ends of six cycles: a tree is verified and its accepted path committed.

    How long that takes for a tree of draws depends on the verdict. It is short where the first leaf is
    accepted and long where all draws are refused. Both are steps.
    tokens: [P], of each sequence and all in the cache.
    """
    params, flat = SamplingParams(1), tokens.new_zeros(1, vocab_size).float()
    generator = torch.Generator(device=tokens.device).manual_seed(0)

    def end(tree: TokenTree, by: SamplingParams, logits: Tensor, kept: list[int]) -> Step:
        def finish() -> None:
            batch = len(cache.lengths)
            laws = [Distribution(by)] * batch
            judge_all(Auto(), [tree] * batch, [logits] * batch, laws, [generator] * batch)
            cache.commit([kept] * batch)
            cache.rewind([len(tokens)] * batch)

        return partial(forward, tree), finish

    def uniform(frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        return [flat.expand(len(frontier.tokens), -1) for frontier in frontiers if frontier]

    # 1. One token, and a branch of the most likely ones.
    one, six = branch(1, tokens), branch(6, tokens)
    steps = [
        end(one, params, forward(one)[0].logits, [0]),
        end(six, SamplingParams(), forward(six)[0].logits, [0, 2, 5]),
    ]

    # 2. Trees of draws from a uniform distribution: their tokens alone are likely, or impossible.
    for shape in shapes:
        (tree,) = grow_together(uniform, [drawn(shape)(tokens[-1:], flat)])
        logits = forward(tree)[0].logits
        among = torch.zeros_like(logits, dtype=torch.bool).index_fill_(1, tree.tokens, True)
        for mask in (~among, among):  # a tiny vocabulary may lie in the tree as a whole
            masked = logits if mask.all() else logits.masked_fill(mask, -torch.inf)
            steps.append(end(tree, params, masked, [0, 1, 3][: shape.max_depth + 1]))
    return steps


def branch(nodes: int, tokens: Tensor) -> TokenTree:
    """A tree of one branch; a forward's time does not depend on the shape."""
    number = torch.arange(nodes, device=tokens.device)
    return TokenTree(tokens[:nodes], number - 1, number, ancestor_mask(number - 1, nodes))
