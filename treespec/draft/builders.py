"""Builds the trees of one sequence with its policy, which calls a `CycleBuilder` (`treespec.trees.shape`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from treespec.draft.auto.cost import CostBy
from treespec.draft.auto.cost_model import CacheOrModel
from treespec.draft.calibration import Calibration
from treespec.draft.drafter import Frontier
from treespec.draft.ranking import HostRanking, TopRanking
from treespec.draft.tree_assembly import Drawn, Growing, Growth, concat_levels
from treespec.sampling.probs import SamplingParams, compute_probs, select_topk, to_float
from treespec.trees.layout import get_layout
from treespec.trees.shape import Policy
from treespec.trees.static import StaticTree, build_chain
from treespec.trees.tree import Draws, TokenTree
from treespec.verify.distributions import select_most_likely
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

# `topk` of one score keeps the first of equal scores in rows of at least this size, as `argmax` does.
MIN_ARGMAX_TOKENS = 64


class TreeBuilder:
    """Builds the trees of one sequence with a policy, and keeps what it learns between cycles.

    Attributes:
        policy: shapes the trees.
        scheme: makes the draws above temperature 0.
        calibration: the head's; None: it has none.
        costs: the measured cost by batch size; the first call measures it.
        choice: decides between its trees and those of a suffix cache.
        drafted: nodes of the tree that was grown last, without the root; 0: its verification was learnt from.
    """

    drafted = 0

    def __init__(
        self,
        policy: Policy,
        scheme: Scheme,
        calibration: Calibration | None = None,
        costs: CostBy | None = None,
    ) -> None:
        self.policy = policy
        self.scheme = scheme
        self.calibration = calibration
        self.costs = costs
        self.choice = CacheOrModel()

    @property
    def seconds(self) -> float | None:
        """Modelled seconds of the present cycle; None: the policy models no time."""
        return None

    def predict_gain(
        self, params: SamplingParams, batch: int = 1, on_cpu: bool = True, length: float = 0.0
    ) -> float:
        """Predicts the speed of drafting in this cycle, as a multiple of one-token decoding; 1: nothing is modelled.

        Call it once a cycle, before `should_skip_cycle`.

        Args:
            params: the sequence's.
            batch: the number of sequences that the cycle decodes together.
            on_cpu: whether it drafts on a CPU.
            length: the mean number of tokens of their texts, if costs are to follow it.
        """
        return 1.0

    def should_skip_cycle(self, gain: float) -> bool:
        """Whether the sequence drafts nothing in this cycle. gain: the mean of the batch's `predict_gain`."""
        return False

    def pass_cycle(self) -> None:
        """Take note of a cycle without drafts in which it was not asked."""

    def grow(
        self,
        root: Tensor,
        logits: Tensor,
        params: SamplingParams,
        generator: torch.Generator,
        ahead: Callable[[], Tensor] | None = None,
        on_host: bool = False,
    ) -> Growth:
        """Grows the tree of one cycle.

        Args:
            root: [1] int64, the last committed token; [B, 1] of a batch whose trees grow together.
            logits: [1, V] draft logits of its children; [B, 1, V] of a batch.
            params: turn draft logits into the distribution that children are drawn from.
            generator: the source of randomness of the draws.
            ahead: returns [D, N] draft logits of all levels; None: the draft model drafts level by level.
            on_host: whether numpy may rank the nodes: of one tree on a CPU that no graph records.
        """
        scheme = self.scheme
        if params.greedy:  # the children are the most likely tokens under every scheme
            scheme = TopK()
        return self.grow_shape(
            CycleBuilder(root, logits, params, generator, scheme, ahead, on_host)
        )

    def build_graph_key(self) -> Policy | None:
        """Returns the policy of this cycle if its tree depends only on the policy and the draft, else None."""
        if self.policy.repeats:
            return self.policy
        return None

    def grow_shape(self, cycle: "CycleBuilder") -> Growth:
        """Grows the tree of the present cycle."""
        tree = yield from self.policy.grow(cycle)
        self.drafted = tree.tokens.shape[-1] - 1
        return tree

    def update(self, path: Sequence[int]) -> None:
        """Learns from a verification. path: the accepted nodes, without the root."""
        if self.drafted:
            self.policy = self.policy.adapt(len(path), self.drafted)
        self.drafted = 0


@dataclass(frozen=True)
class CycleBuilder:
    """Grows the tree of one sequence in one cycle; its policy calls these methods (`treespec.trees.shape.Builder`).

    Attributes:
        root, logits, params, generator, ahead, on_host: as in `TreeBuilder.grow`.
        scheme: makes the draws of this cycle.
    """

    root: Tensor
    logits: Tensor
    params: SamplingParams
    generator: torch.Generator
    scheme: Scheme
    ahead: Callable[[], Tensor] | None = None
    on_host: bool = False

    @property
    def one_hot(self) -> bool:
        return self.scheme.deterministic

    def predict_levels(self, depth: int, ranks: int) -> Growing[np.ndarray]:
        assert self.ahead
        levels = compute_probs(self.ahead()[:depth], self.params)
        topk = min(ranks, levels.shape[1])
        if self.scheme.max_draws:
            topk = min(topk, self.scheme.max_draws)
        probabilities = yield select_topk(levels, topk)[0].double()
        return probabilities.numpy()

    def grow_fixed(self, shape: StaticTree) -> Growth:
        """Grows a tree of a fixed shape, with one draft step and one batch of draws for each level."""
        if self.on_host and self.scheme.takes_most_likely:
            return (yield from self.grow_most_likely(shape))
        tokens = [self.root]
        levels = list[Drawn]()
        logits = self.logits
        layout = get_layout(shape, logits.device)
        level_above = None
        for level in layout.levels:
            # 1. The draft logits of the children of the level's inner nodes. An absent draw counts as token 0.
            if level_above is not None:
                frontier_tokens = tokens[-1][level.nodes - level_above.first].clamp_min(0)
                logits = yield Frontier(frontier_tokens, level.parent_rows)
            level_above = level

            # 2. The draws at all of these nodes.
            q, draws = self.draw(logits, level.draws)

            # 3. The children's tokens, and the draws that the verifier needs.
            tokens.append(draws.tokens[level.rows, level.columns])
            levels.append(Drawn(level.nodes, q, draws))
        drafts = None
        if not self.scheme.deterministic:
            drafts = concat_levels(levels)
        return TokenTree(torch.cat(tokens), layout.parents, layout.depth, layout.ancestors, drafts)

    def grow_most_likely(self, shape: StaticTree) -> Growth:
        """Grows the same tree as `grow_fixed` on a CPU, if the children are the most likely tokens: no draws."""
        layout = get_layout(shape, self.logits.device)
        tokens = np.empty(shape.size, dtype=np.int64)
        tokens[0] = int(self.root)
        logits = self.logits
        for level in list_most_likely_levels(shape):
            # 1. The draft logits of the children of the level's inner nodes. An absent child counts as token 0.
            if level.first > 1:
                frontier_tokens = np.maximum(tokens[level.nodes], 0)
                logits = yield Frontier(torch.from_numpy(frontier_tokens), level.parent_rows)

            # 2. The children's tokens.
            best = select_most_likely_on_host(logits, level.width)
            tokens[level.first : level.first + len(level.slots)] = best.reshape(-1)[level.slots]
        return TokenTree(torch.from_numpy(tokens), layout.parents, layout.depth, layout.ancestors)

    def grow_confident(self, depth: int, threshold: float) -> Growth:
        """Grows a chain; before a node gets its draw, the probability of its own token decides whether it does."""
        tokens = [self.root]
        levels = list[Drawn]()
        logits = self.logits
        for level in get_layout(build_chain(depth), logits.device).levels:
            # 1. The draft logits below the last token. An absent draw counts as token 0.
            if levels:
                last_token = tokens[-1].clamp_min(0)
                probability = yield self.compute_confidence(logits)[0, last_token]
                if float(probability) < threshold:
                    break
                logits = yield Frontier(last_token, level.parent_rows)

            # 2. The draw.
            q, draws = self.draw(logits, level.draws)
            tokens.append(draws.tokens[:, 0])
            levels.append(Drawn(level.nodes, q, draws))
        layout = get_layout(build_chain(len(levels)), logits.device)
        drafts = None
        if not self.scheme.deterministic:
            drafts = concat_levels(levels)
        return TokenTree(torch.cat(tokens), layout.parents, layout.depth, layout.ancestors, drafts)

    def compute_confidence(self, logits: Tensor) -> Tensor:
        """Returns the draft probabilities [F, V] of logits [F, V]; at temperature 0 those at temperature 1."""
        if self.params.greedy:
            return to_float(logits).softmax(-1)
        return compute_probs(logits, self.params)

    def draw(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Draws]:
        """Draws children at F nodes; returns q [F, V] and the draws from it [F, K].

        A deterministic scheme ranks the logits themselves, and takes max(counts) tokens at each node.

        logits: [F, V]. counts: [F] int64 on the host, the number of draws at each node.
        """
        if self.scheme.deterministic:
            return logits, self.scheme.draw(logits, int(counts.max()), self.generator)
        q = compute_probs(logits, self.params)
        return q, self.scheme.draw(q, counts, self.generator)

    def grow_ranked(self, depth: int, topk: int, nodes: int) -> Growth:
        if self.on_host:
            return (yield from HostRanking(depth, topk, nodes).grow_tree(self.root, self.logits))
        return (yield from TopRanking(depth, topk, nodes).grow(self.root, self.logits))


@dataclass(frozen=True)
class MostLikelyLevel:
    """A level of a fixed tree on a CPU, whose children are the most likely tokens (`treespec.trees.layout.Level`).

    Attributes:
        nodes: [F] int64, the numbers of its inner nodes.
        parent_rows: [F] int64, the row of each one's parent in the frontier above.
        width: K, the most likely tokens that are ranked at each of them.
        first: the node number of the first child.
        slots: [C] int64, the place of each child among the F K ranked tokens.
    """

    nodes: np.ndarray
    parent_rows: Tensor
    width: int
    first: int
    slots: np.ndarray


@lru_cache
def list_most_likely_levels(shape: StaticTree) -> tuple[MostLikelyLevel, ...]:
    """Lists the levels of a fixed tree; they are built once for each tree."""
    levels = []
    for level in get_layout(shape, torch.device("cpu")).levels:
        width = int(level.draws.max())
        slots = (level.rows * width + level.columns).numpy()
        levels.append(
            MostLikelyLevel(level.nodes.numpy(), level.parent_rows, width, level.first, slots)
        )
    return tuple(levels)


def select_most_likely_on_host(logits: Tensor, width: int) -> np.ndarray:
    """Returns [F, width] the most likely tokens of logits [F, V] on a CPU, as `select_most_likely`."""
    vocab_size = logits.shape[-1]
    if width == 1 and vocab_size >= MIN_ARGMAX_TOKENS:
        return to_float(logits).numpy().argmax(-1)
    if width <= vocab_size:
        return select_topk(logits, width)[1].numpy()
    return select_most_likely(logits, width).numpy()  # pads the rows
