"""Runs and times the parts of a cycle, as decoding runs them."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from treespec.draft.auto.builder import CostAwareRanking
from treespec.draft.auto.cost import CycleCost
from treespec.draft.auto.cost_model import CostModel
from treespec.draft.best_tree import CandidateLevel
from treespec.draft.drafter import GrowthKey, Proposer
from treespec.draft.ranking import TopRanking
from treespec.draft.tree_assembly import Growth, grow_together
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Sampler
from treespec.trees.dynamic import AutoTree
from treespec.trees.mask import build_ancestor_mask
from treespec.trees.static import StaticTree
from treespec.trees.tree import TokenTree, to_device
from treespec.verify.batch import verify_trees
from treespec.verify.gumbel import AUTO_VERIFIER

COMMITTED_AT_ONCE = 256  # tokens of a longer text
BATCH_NODES = 256  # nodes of a batch; measured if the context has room for them
WAITING_TOKENS = 3  # that the last cycle committed
# Rounds stop after MEASURING_SECONDS, but not before MIN_ROUNDS.
MAX_ROUNDS = 12
MIN_ROUNDS = 4
MEASURING_SECONDS = 10.0

Act = Callable[[], object]


@dataclass(frozen=True)
class Step:
    """A call to time, and the call that precedes it in decoding, which warms the processor's caches.

    before: None: the step that was timed before this one.
    """

    before: Act | None
    timed: Act


@final
class Bench:
    """Equal sequences in the target's cache, observed by the proposer, and the parts of their cycle."""

    def __init__(
        self, target: Target, proposer: Proposer | None, context: int, texts: int = 1
    ) -> None:
        self.target = target
        aux_layers: tuple[int, ...] = ()
        if proposer:
            aux_layers = proposer.aux_layers
        # The context may exceed the target's context length.
        ids = torch.arange(context + BATCH_NODES, device=target.output_device)
        self.ids = ids % target.vocab_size
        self.tokens = self.ids[:context].cpu()
        self.texts = texts
        self.cache = target.build_cache(len(ids))
        self.cache.rewind([0] * texts)
        self.features = target.prefill(self.cache, self.tokens.expand(texts, -1), aux_layers)[0]
        if proposer:
            observers = []
            for _ in range(texts):
                observer = proposer.new()
                observer.observe([self.features[:-1]], [self.tokens])
                observers.append(observer)
            self.proposer = observers[0]
            self.proposer.join(observers[1:])

    def extend_text(self, tokens: int) -> None:
        """Commits further tokens without a forward: their keys and values are zeros, which take as long."""
        self.cache.reserve(self.cache.end + tokens + BATCH_NODES)
        for _ in range(0, tokens, COMMITTED_AT_ONCE):
            self.cache.commit([range(COMMITTED_AT_ONCE)])

    def build_branch(self, nodes: int) -> TokenTree:
        """Builds a tree of one branch; a forward's time does not depend on the shape."""
        number = torch.arange(nodes, device=self.ids.device)
        return TokenTree(self.ids[:nodes], number - 1, number, build_ancestor_mask(number - 1))

    def forward(self, tree: TokenTree) -> Tensor:
        return self.target.forward_trees(self.cache, [tree])[0].logits

    def draft(self, shape: StaticTree) -> None:
        """Drafts a chain after observing a few new tokens, by a CUDA graph if decoding uses one."""
        proposer = self.proposer
        depth = shape.max_depth
        root = self.ids[:1]
        grow = TopRanking(depth, topk=10, nodes=depth + 1, expanded=1).grow
        if root.device.type == "cpu" and not proposer.records_graphs:
            grow = partial(grow_costed_chain, depth)
        waiting = slice(-1 - WAITING_TOKENS, None)
        proposer.rewind([len(self.tokens) - 1 - WAITING_TOKENS] * self.texts)
        proposer.observe(
            [self.features[waiting][:-1]] * self.texts, [self.tokens[waiting]] * self.texts
        )
        roots = self.tokens[-1:].expand(self.texts)
        begun = [row for row in proposer.begin(roots, self.cache) if row is not None]

        def grow_rows(
            ends: Tensor, rows: Sequence[Tensor | None], _: Tensor | None
        ) -> list[TokenTree]:
            growths = []
            for end, row in zip(to_device(ends, root.device).split(1), rows, strict=True):
                if row is not None:
                    growths.append(grow(end, row))
            return grow_together(proposer.extend, growths)

        proposer.grow_by_graph(grow_rows, roots, begun, None, GrowthKey((shape,)))

    def end(self, tree: TokenTree, kept: list[int]) -> Step:
        """Returns the step that verifies a tree and commits a path. kept: nodes of the path, with the root."""
        logits = self.forward(tree)
        sampler = Sampler(SamplingParams())
        generator = torch.Generator(device=self.ids.device)

        def finish() -> None:
            verify_trees(AUTO_VERIFIER, [tree], [logits], [sampler], [generator])
            self.cache.commit([kept])
            self.cache.rewind([len(self.tokens)])

        return Step(partial(self.forward, tree), finish)


class CostedChainRanking(CostAwareRanking):
    """Ranks nodes as `auto` does, but expands one node of each level."""

    def choose_width(self, level: int, levels: list[CandidateLevel]) -> int:
        super().choose_width(level, levels)
        self.nodes = 1 + level
        return int(level < self.depth)


def grow_costed_chain(depth: int, root: Tensor, logits: Tensor) -> Growth:
    """Grows a chain of `depth` levels as `auto` grows its trees on a CPU. root: [1]. logits: [1, V] of its children."""
    tree = AutoTree(depth=depth, nodes=depth + 1)
    model = CostModel(CycleCost((1, 64), (1.0, 2.0)))  # any cost: the ranking takes as long
    model.start(model.plain)
    ranking = CostedChainRanking(tree, model, SamplingParams(0.0), None)
    return (yield from ranking.grow_tree(root, logits))


def time_steps(
    steps: Sequence[Step], device: torch.device, rounds: int = MAX_ROUNDS
) -> list[float]:
    """Returns the seconds of each step, the lower quartile over interleaved rounds after one warm-up round."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    seconds: list[list[float]] = [[] for _ in steps]
    measuring_since = time.perf_counter()
    for done in range(rounds + 1):
        if done > MIN_ROUNDS and time.perf_counter() - measuring_since > MEASURING_SECONDS:
            break
        for step, step_seconds in zip(steps, seconds, strict=True):
            if step.before is not None:
                step.before()
                wait()
            started = time.perf_counter()
            step.timed()
            wait()
            step_seconds.append(time.perf_counter() - started)
    return [statistics.quantiles(times[1:], n=4, method="inclusive")[0] for times in seconds]
