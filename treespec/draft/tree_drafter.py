"""Growing a token tree: a proposer gives draft logits, a scheme draws, a policy shapes."""

import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.draft.calibration import Calibration, nearest
from treespec.draft.drafter import Drafter
from treespec.draft.grow.auto import Shape, grow_auto, shape_for
from treespec.draft.grow.confident import Confidence, grow_confident
from treespec.draft.grow.dynamic import grow_dynamic
from treespec.draft.grow.growth import Growth, grow_together
from treespec.draft.grow.sampled import Sampled, grow_sampled
from treespec.draft.grow.static import grow_static
from treespec.draft.pace.pace import Pace
from treespec.draft.pace.times import Times
from treespec.draft.pairing import Draws, check_fit
from treespec.draft.proposer import Frontier, Proposer
from treespec.draft.vocabulary import in_target
from treespec.sampling import SamplingParams
from treespec.target import TreeOutput
from treespec.trees.auto import AutoTree
from treespec.trees.confident import ConfidentChain
from treespec.trees.dynamic import DynamicTree
from treespec.trees.policy import Policy
from treespec.trees.sampled import SampledTree
from treespec.trees.tree import TokenTree, root_only
from treespec.verify.registry import SCHEMES
from treespec.verify.scheme import Scheme

COLDEST = 0.01  # whose rates are those of temperature 0


@final
class TreeDrafter(Drafter):
    """Drafts a tree a cycle for each text that its proposer holds.

    At temperature 0 the children are the likeliest tokens under every scheme: the target's law is one-hot there, so
    all lossless plans agree (output the target's token), and what is left to choose is the set of children. Raises
    InputError for a policy and scheme that may not go together, and for a tree deeper than the proposer drafts.
    """

    per_text = ("proposer", "paces")

    def __init__(
        self,
        proposer: Proposer,
        policy: Policy,
        scheme: Scheme,
        calibration: Calibration | None = None,
        times: Callable[[], Times] | None = None,
    ) -> None:
        model = Draws(
            several=proposer.law_per_draw,
            trained=proposer.head is not None,
            deepest=proposer.max_depth,
            calibrated=calibration is not None,
        )
        check_fit(policy, scheme, model)
        self.proposer, self.scheme, self.calibration = proposer, scheme, calibration
        self.policy: Policy = policy
        self.times, self.now = times, time.perf_counter
        self.paces = [self._pace()]

    @torch.no_grad()
    def draft_trees(
        self,
        roots: Tensor,
        params: SamplingParams,
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        rests = [self._rests(row, params) for row in range(len(roots))]
        if all(rests):
            return [root_only(root) for root in roots.split(1)]
        started, self.now = now(), now
        begun = self.proposer.begin(roots, cache)
        self.forward_seconds += now() - started
        texts = enumerate(zip(roots.split(1), begun, generators, strict=True))
        growths = [
            self._grow(row, root, None if rests[row] else logits, params, generator)
            for row, (root, logits, generator) in texts
        ]
        trees, vocabulary = grow_together(self, growths), self.proposer.vocabulary
        return (
            trees if vocabulary is None else [in_target(tree, vocabulary, self.proposer.vocab_size) for tree in trees]
        )

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """One level of all trees: the proposer's, timed."""
        started = self.now()
        logits = self.proposer.extend(frontiers)
        self.forward_seconds += self.now() - started
        return logits

    def _grow(
        self, row: int, root: Tensor, logits: Tensor | None, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        """In draft tokens, but for the root."""
        if logits is None:
            return root_only(root)
        root, tree = root.to(logits.device), self.policy
        if isinstance(tree, AutoTree):
            return (yield from self._auto(row, root, logits, tree, params, generator))
        if isinstance(tree, SampledTree) and params.greedy:
            tree = DynamicTree(tree.depth, nodes=tree.nodes)
        if isinstance(tree, SampledTree):
            assert self.calibration
            price = tree.price or self.calibration.price(tree.nodes, params.temperature)
            by = Sampled(self.scheme, self.calibration, tree.depth, price)
            return (yield from grow_sampled(root, logits, by, params, generator))
        if isinstance(tree, DynamicTree):
            return (yield from grow_dynamic(root, logits, tree))
        scheme = SCHEMES["topk"] if params.greedy else self.scheme
        if isinstance(tree, ConfidentChain):
            pace = self.paces[row]
            assert isinstance(pace, Confidence)
            grown = yield from grow_confident(root, logits, tree.depth, pace.threshold, scheme, params, generator)
            pace.levels = len(grown.tokens) - 1
            return grown
        return (yield from grow_static(root, logits, tree, scheme, params, generator))

    def _rests(self, row: int, params: SamplingParams) -> bool:
        """Whether a text goes without drafts this cycle, as auto trees may."""
        if not isinstance(self.policy, AutoTree):
            return False
        pace = self.paces[row]
        if pace is None:
            assert self.times
            known = self.calibration.rates if self.calibration else {}
            rates = nearest(known, max(params.temperature, COLDEST)) if known else None
            pace = self.paces[row] = Pace(self.times(), rates)
        assert isinstance(pace, Pace)
        if pace.idle:  # nothing was learned since it was last asked
            return pace.rests(pace.hope)
        shape = self._shape(pace, self.policy, params)
        if not shape.likeliest:
            return pace.rests(shape.speed)
        pace.start(shape.speed)
        return pace.rests(max(shape.speed, pace.speed))

    def _shape(self, pace: Pace, tree: AutoTree, params: SamplingParams) -> Shape:
        """The best of the trees whose shape is settled before anything is drafted."""
        likeliest = params.greedy or self.scheme.deterministic
        return shape_for(pace, tree, 0 if likeliest else self.scheme.max_draws)

    def _auto(
        self,
        row: int,
        root: Tensor,
        logits: Tensor,
        tree: AutoTree,
        params: SamplingParams,
        generator: torch.Generator,
    ) -> Growth:
        pace = self.paces[row]
        assert isinstance(pace, Pace)
        shape = self._shape(pace, tree, params)
        if shape.likeliest and pace.speed > shape.speed:
            return (yield from grow_auto(root, logits, tree, params, pace, self.calibration))
        pace.promise = shape.promise(pace)
        scheme = SCHEMES["topk"] if shape.likeliest else self.scheme
        return (yield from grow_static(root, logits, shape.tree, scheme, params, generator))

    @property
    def taps(self) -> tuple[int, ...]:
        return self.proposer.taps

    @property
    def timed(self) -> bool:
        return isinstance(self.policy, AutoTree)

    @property
    def lengths(self) -> list[int]:
        return self.proposer.lengths

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.proposer.observe(features, tokens)

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        for pace, path in zip(self.paces, paths, strict=True):
            if pace:
                pace.settle(path)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.proposer.rewind(lengths)
        self.paces = [self._pace() for _ in lengths]

    def new(self) -> "TreeDrafter":
        return TreeDrafter(self.proposer.new(), self.policy, self.scheme, self.calibration, self.times)

    def _pace(self) -> Pace | Confidence | None:
        if isinstance(self.policy, ConfidentChain):
            return Confidence(self.policy)
        return None
