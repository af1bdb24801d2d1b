"""Grow token trees: a proposer computes draft logits, a scheme draws, a policy shapes.

With a suffix cache next to the proposer (`--drafter suffix+eagle:HEAD`) each cycle's tree comes from
the cache or from the proposer, whichever promises more. The choice depends on the past alone, and a
tree of the cache has one-hot distributions. So every verifier stays lossless.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.cost.model import CostBy
from treespec.draft.cost.running import Choice
from treespec.draft.drafter import Drafter, Frontier, Proposer
from treespec.draft.grow.auto import AutoBuilder
from treespec.draft.grow.builder import TreeBuilder
from treespec.draft.grow.growth import Growth, grow_together, ungrown
from treespec.draft.grow.shaped import below_chain, grow_shaped, in_drafts, shape_drafts, with_chain
from treespec.draft.model_free.budget import reached
from treespec.draft.model_free.one_hot import OneHotDrafter
from treespec.draft.pairing import DraftModel, check_fit
from treespec.draft.vocabulary import in_target
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.distribution import Distribution
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree, root_only
from treespec.verify.scheme import Scheme

MOST_STEPS = 8  # forced tokens that a draft model steps along; each step costs a draft forward


@final
class TreeDrafter(Drafter):
    """Drafts a tree a cycle for each text that its proposer holds.

    At temperature 0 the children are the likeliest tokens under every scheme. There the target's
    law is one-hot, so every lossless plan outputs the target's token, and only the set of children
    is left to choose.
    Raises InputError for a policy and scheme that may not go together, and for a tree deeper than
    the proposer drafts.

    builders: one a text; each shapes the trees of its text and keeps what it learns there.
    cache: a drafter with probabilities. idle: texts whose present tree is the cache's.
    """

    per_text: tuple[str, ...] = ("proposer", "builders")

    def __init__(
        self,
        proposer: Proposer,
        policy: Policy,
        scheme: Scheme,
        calibration: Calibration | None = None,
        times: CostBy | None = None,
    ) -> None:
        model = DraftModel(
            several=proposer.law_per_draw,
            trained=proposer.head is not None,
            deepest=proposer.max_depth,
            calibrated=calibration is not None,
            at_once=proposer.at_once,
        )
        check_fit(policy, scheme, model)
        self.proposer, self.scheme, self.calibration = proposer, scheme, calibration
        self.policy: Policy = policy
        self.times, self.now = times, time.perf_counter
        self.builders = [self._new_builder()]
        self.chains: list[list[int]] = [[]]  # forced tokens of this cycle, by text
        self.cache: OneHotDrafter | None = None
        self.choices, self.idle = [Choice()], [False]

    def beside(self, cache: OneHotDrafter) -> Self:
        """This drafter, with a suffix cache that drafts for the same texts."""
        self.cache, self.per_text = cache, (*TreeDrafter.per_text, "cache", "choices")
        return self

    @torch.no_grad()
    def draft_trees(
        self,
        roots: Tensor,
        laws: Sequence[Distribution],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        # 1. Forced tokens, the cache's trees, and texts that go without drafts this cycle.
        self.chains, self.idle = [law.forced() for law in laws], [False] * len(laws)
        offers = self._offers(self.cache, roots, laws) if self.cache else []
        texts = zip(self.builders, laws, self.idle, strict=True)
        rests = [
            idle or builder.pauses(law.params, law.company(len(laws))) or law.over
            for builder, law, idle in texts
        ]

        # 2. A tree for each of the others.
        if all(rests):
            trees = [root_only(root) for root in self._ends(roots).split(1)]
        else:
            trees = self._grown(roots, laws, generators, cache, rests, now)

        # 3. Below the forced tokens.
        for row, chain in enumerate(self.chains):
            if self.idle[row] and self.cache:
                trees[row] = self.cache.below_chain(row, roots[row], offers[row])
            elif chain:
                root, scheme = roots[row : row + 1], self.scheme
                trees[row] = with_chain(root, chain, trees[row], scheme, generators[row])
        return trees

    def _offers(
        self, cache: OneHotDrafter, roots: Tensor, laws: Sequence[Distribution]
    ) -> list[TokenTree]:
        """The cache's tree for each text. Sets `idle`."""
        cache.chains, offers = self.chains, []
        for row, (root, law) in enumerate(zip(roots, laws, strict=True)):
            pace = cache.pace(row, law)
            tree, probabilities = cache.tree(row, root, torch.Generator(), pace)
            assert probabilities is not None
            score, nodes = reached(tree.parents.numpy(), probabilities)[1:].sum(), len(tree.tokens)
            preferred = self.choices[row].prefers_memory(float(score), nodes, pace)
            self.idle[row] = preferred and nodes > 1 and not law.over
            offers.append(tree)
        return offers

    def _ends(self, roots: Tensor) -> Tensor:
        """[B] the tokens below which trees are drafted: the last forced ones, or the roots [B]."""
        if not any(self.chains):
            return roots
        pairs = zip(roots.split(1), self.chains, strict=True)
        return torch.cat([root.new_tensor(chain[-1:]) if chain else root for root, chain in pairs])

    def _grown(
        self,
        roots: Tensor,
        laws: Sequence[Distribution],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        rests: Sequence[bool],
        now: Callable[[], float],
    ) -> list[TokenTree]:
        """Trees that the draft model grows, each below its text's forced tokens."""
        # 1. Draft logits for the children of the roots.
        started, self.now = now(), now
        begun = self.proposer.begin(roots, cache)
        self.forward_seconds += now() - started

        # 2. A tree for each text, in draft tokens but for the root.
        growths: list[Growth] = []
        for row, (root, logits) in enumerate(zip(self._ends(roots).split(1), begun, strict=True)):
            if rests[row] or logits is None:
                growths.append(ungrown(root))
                continue
            own_root = root.to(logits.device)
            growths.append(self._growth(row, own_root, logits, laws[row], generators[row]))
        trees, vocabulary = grow_together(self, growths), self.proposer.vocabulary

        # 3. In the target's tokens.
        if vocabulary is None:
            return trees
        return [in_target(tree, vocabulary, self.proposer.vocab_size) for tree in trees]

    def _growth(
        self, row: int, root: Tensor, logits: Tensor, law: Distribution, generator: torch.Generator
    ) -> Growth:
        """The growth of a text's tree, of logits that its law shapes and hears.

        root: [1] int64, the last forced token if there is one. logits: [1, N] below the text.
        """
        builder, params, chain = self.builders[row], law.params, self.chains[row]
        if self.proposer.at_once:
            builder.ahead = lambda: self.proposer.levels(row)[len(chain) :]
        if not law.shapers and law.heard is None:
            return builder.grow(root, logits, params, generator)
        vocabulary, size = self.proposer.vocabulary, self.proposer.vocab_size

        def grow(logits: Tensor) -> Growth:
            return grow_shaped(
                lambda shaped: builder.grow(root, shaped, params, generator),
                logits,
                lambda paths, rows: shape_drafts(law, paths, rows, vocabulary, size),
                vocabulary,
                tuple(chain),
            )

        if not chain:
            return grow(logits)
        drafted = self._steps(chain, logits.device)
        return ungrown(root) if drafted is None else below_chain(drafted, grow, logits)

    def _steps(self, chain: Sequence[int], device: torch.device) -> Tensor | None:
        """[n] the draft tokens of a chain that the draft model steps along; None: it does not."""
        deepest = self.proposer.max_depth
        levels = len(chain) + self.policy.max_depth
        if len(chain) > MOST_STEPS or (deepest is not None and levels > deepest):
            return None
        return in_drafts(chain, self.proposer.vocabulary, device)

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """Draft one level of all trees, and time it."""
        started = self.now()
        logits = self.proposer.extend(frontiers)
        self.forward_seconds += self.now() - started
        return logits

    @property
    def taps(self) -> tuple[int, ...]:
        return self.proposer.taps

    @property
    def timed(self) -> bool:
        return self.policy.timed

    @property
    def lengths(self) -> list[int]:
        return self.proposer.lengths

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.proposer.observe(features, tokens)
        if self.cache:
            self.cache.observe(features, tokens)

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        for row, (builder, path, chain) in enumerate(
            zip(self.builders, paths, self.chains, strict=True)
        ):
            if not self.idle[row]:
                if self.cache:
                    self.choices[row].settle(len(path), builder.seconds)
                builder.update([node - len(chain) for node in path[len(chain) :]])

    def rewind(self, lengths: Sequence[int]) -> None:
        self.proposer.rewind(lengths)
        self.builders = [self._new_builder() for _ in lengths]
        self.choices = [Choice() for _ in lengths]
        if self.cache:
            self.cache.rewind(lengths)

    def enter(self, memory: str | None) -> None:
        if self.cache:
            self.cache.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        if self.cache:
            self.cache.remember(memory, answer)

    def new(self) -> "TreeDrafter":
        parts = (self.policy, self.scheme, self.calibration, self.times)
        new = TreeDrafter(self.proposer.new(), *parts)
        return new.beside(self.cache.new()) if self.cache else new

    def _new_builder(self) -> TreeBuilder[Any]:
        kind: type[TreeBuilder[Any]] = AutoBuilder if self.policy.timed else TreeBuilder
        return kind(self.policy, self.scheme, self.calibration, self.times)
