"""Measure the cost of a cycle's parts with the decoding code itself."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from treespec.draft.fit.ends import branch, ends, rests
from treespec.draft.fit.timing import FEWEST, ROUNDS, Act, Step, fast_times, measured_and_kept
from treespec.draft.grow.growth import Growth, grow_together
from treespec.draft.grow.likeliest import best_of, likely
from treespec.draft.grow.nodes import Nodes
from treespec.draft.grow.static import grow_static
from treespec.draft.pace.times import NODES, NODES_TOGETHER, Times, TimesBy, alike, kept_times, key
from treespec.draft.proposer import Proposer
from treespec.files.packages import cache_folder
from treespec.model.cache import TreeCache
from treespec.model.target import Target, TreeOutput
from treespec.shaping.sampling import SamplingParams
from treespec.trees.static import StaticTree, balanced
from treespec.trees.tree import TokenTree
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.topk import TopK

log = logging.getLogger(__name__)

CONTEXT, WAITING = 192, 3  # tokens before the tree, and tokens that the last cycle committed
DEEP = 5  # levels, at most
WIDE = 6  # nodes of a wide level
DEAR = 6  # one-token forwards: measure no tree larger than the first that costs this much
TOGETHER = 4, 2  # rounds, and the fewest, of several texts: their forwards are dear

DRAWS, WIDER = RRSWithoutReplacement(), balanced(2, 3)


def measured_times(
    target: Target, proposer: Proposer | None, given: Times | TimesBy | None = None
) -> TimesBy:
    """Times by the number of texts that a cycle decodes together; measured when first asked for.

    given: take these, whatever the number.
    """
    if isinstance(given, Times):
        return lambda texts: given
    measured = lru_cache(None)(lambda texts: times_for(target, proposer, texts=texts))
    return given or (lambda texts: measured(alike(texts)))


def measure_up_to(batch: int, times: TimesBy) -> None:
    """Measure for each number of texts that a batch may shrink to."""
    for texts in sorted({alike(texts) for texts in range(1, batch + 1)}):
        times(texts)


def times_for(
    target: Target, proposer: Proposer | None, folder: Path | None = None, texts: int = 1
) -> Times:
    """Times from the cache folder, or measured now, which takes a few seconds.

    proposer: None measures the target alone. folder: default treespec's in the user's cache.
    texts: that a cycle decodes together.
    """
    folder = folder or cache_folder()
    file = folder / f"times-{key(target, proposer, texts)}.json"
    if (kept := kept_times(file)) is not None:
        return kept
    if texts > 1:
        log.warning("measuring cycles of %d texts, once for this machine and model", texts)
    return measured_and_kept(file, lambda: measure(target, proposer, texts), asdict)


@torch.inference_mode()
def measure(target: Target, proposer: Proposer | None, texts: int = 1) -> Times:
    """Measure all of `Times`. proposer: None leaves the drafts at 0."""
    # 1. Equal texts, in the target's cache and observed by the proposer.
    # CONTEXT may exceed the target's context length.
    tokens = torch.arange(CONTEXT, device=target.output_device) % target.vocab_size
    cache = target.new_cache(512 if texts == 1 else CONTEXT + NODES_TOGETHER[-1])
    taps = proposer.taps if proposer else ()
    features = target.prefill(cache, tokens[None], taps)[0]
    cache.select([0] * texts)
    generator = torch.Generator(device=target.output_device).manual_seed(0)

    forward = partial(forward_all, target, cache)
    between: Act = partial(forward, branch(4, tokens)) if texts == 1 else nothing
    earlier = between  # before a forward over several nodes

    # 2. Drafts of one level and of several, with one node a level and with many.
    deep = min(DEEP, proposer.max_depth or DEEP) if proposer else DEEP
    few = min(deep, WIDER.max_depth)
    drafting: list[Step] = []
    if proposer:
        proposers = [proposer.new() for _ in range(texts)]
        for new in proposers:
            new.observe([features[:-1]], [tokens])
        proposer = proposers[0]
        proposer.join(proposers[1:])
        draft = partial(drafts, proposer, cache, features, tokens, generator)
        acts = [partial(draft, draws, depth) for draws in (None, 2, 1, 0) for depth in (1, deep)]
        wide = partial(draft, None, deep, WIDE), partial(draft, 2, few, tree=WIDER.cut(few))
        drafting = [(between, act) for act in (*acts, *wide)]
        earlier = acts[-1] if texts == 1 else between

    # 3. Forwards over growing numbers of nodes, up to the first that is too dear.
    nodes = affordable(target, cache, tokens)
    steps: list[Step] = [
        (between if n == 1 else earlier, partial(forward, branch(n, tokens))) for n in nodes
    ]

    # 4. Verifying and committing.
    last = ends(forward, cache, tokens, target.vocab_size)
    steps += last + drafting

    # 5. Time them all.
    rounds, fewest = (ROUNDS, FEWEST) if texts == 1 else TOGETHER
    costs = fast_times(steps, target.output_device, rounds, fewest)
    of_drafts = costs[len(nodes) + len(last) :] or [0.0] * 10
    rest, judged = rests(costs[len(nodes) : len(nodes) + len(last)])
    forwards = tuple(costs[: len(nodes)])
    return Times(nodes, forwards, **draft_times(of_drafts, deep, few), rest=rest, judged=judged)


def draft_times(seconds: Sequence[float], deep: int, few: int) -> dict[str, Any]:
    """The fields of `Times` about drafts, from the seconds of the steps of `measure`.

    seconds: of one level and of `deep` levels, for each kind of tree; then of `deep` wide levels, and
    of WIDER's first `few` levels.
    """
    # 1. Split the levels of each kind into the first and each further one.
    further, of_one, of_deep = max(deep - 1, 1), seconds[:8:2], seconds[1:8:2]
    chosen, drawn, single, fixed = (
        (first, max(last - first, 0) / further) for first, last in zip(of_one, of_deep, strict=True)
    )

    # 2. What a wide level takes beyond that is the further nodes' share.
    narrow, wide, wider = seconds[1], seconds[8], seconds[9]
    inner = 2**few - 1 - few  # nodes of WIDER that have children, beyond one a level
    return {
        "begin": chosen[0],
        "step": chosen[1],
        "drawn": drawn,
        "single": single,
        "fixed": fixed,
        "row": max(wide - narrow, 0) / further / (WIDE - 1),
        "drawn_row": max(wider - drawn[0] - drawn[1] * (few - 1), 0) / max(inner, 1),
    }


def affordable(target: Target, cache: TreeCache, tokens: Tensor) -> tuple[int, ...]:
    """The sizes up to the first whose forward costs DEAR one-node forwards."""
    seconds: list[float] = []
    alone = len(cache.lengths) == 1
    sizes, least = (NODES, 4) if alone else (NODES_TOGETHER, 2)
    for n in sizes:
        forward = partial(forward_all, target, cache, branch(n, tokens))
        step = (forward if alone else nothing, forward)
        seconds.append(fast_times([step], target.output_device, rounds=2)[0])
        if len(seconds) > least and seconds[-1] > DEAR * seconds[0]:
            break
    return sizes[: len(seconds)]


def drafts(
    proposer: Proposer,
    cache: TreeCache,
    features: Tensor,
    tokens: Tensor,
    generator: torch.Generator,
    draws: int | None,
    depth: int,
    width: int = 1,
    tree: StaticTree | None = None,
) -> None:
    """Draft after observing a few new tokens.

    draws: as in `Times.levels`. width: nodes a level, of trees chosen level by level. tree: default:
    one node of a level has children.
    """
    # 1. Observe the same tokens of each text.
    texts = len(cache.lengths)
    proposer.rewind([CONTEXT - 1 - WAITING] * texts)
    proposer.observe([features[-1 - WAITING : -1]] * texts, [tokens[-1 - WAITING :]] * texts)

    # 2. A tree for each.
    growths = []
    for logits in proposer.begin(tokens[-1:].expand(texts), cache):
        assert logits is not None
        if draws is None:
            growths.append(grow_wide(tokens[-1:], logits, depth, width))
            continue
        ranks = range(max(draws, 1))
        narrow = StaticTree(
            tuple((0,) * level + (rank,) for level in range(depth) for rank in ranks)
        )
        scheme, params = DRAWS if draws else TopK(), SamplingParams(1.0)
        growths.append(grow_static(tokens[-1:], logits, tree or narrow, scheme, params, generator))
    grow_together(proposer, growths)


def grow_wide(root: Tensor, logits: Tensor, depth: int, width: int) -> Growth:
    """The auto tree's steps at a fixed width. root: [1] int64. logits: [1, V] draft logits."""
    nodes = Nodes(root)
    frontier = [0]
    for level in range(depth):
        children, chance = likely(logits, 10, level, SamplingParams(), None)
        first, per_node = nodes.count, children.shape[1]
        nodes.add(children.ravel(), torch.tensor(frontier).numpy().repeat(per_node))
        if level == depth - 1:
            break
        best = best_of(chance.ravel(), width)
        frontier = (first + best).tolist()
        logits = yield nodes.frontier(best, best // per_node)
    return nodes.tree()


def forward_all(target: Target, cache: TreeCache, tree: TokenTree) -> list[TreeOutput]:
    """The forward of a cycle in which every text has this tree."""
    return target.forward_trees(cache, [tree] * len(cache.lengths))


def nothing() -> None:
    """Before a forward over several texts, whose time depends little on what lies in the caches."""
