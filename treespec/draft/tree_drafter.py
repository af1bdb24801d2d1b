"""Grows token trees: a proposer computes draft logits, a scheme draws children, a policy chooses the shape.

With a suffix cache next to the proposer (`--drafter suffix+eagle:HEAD`), each cycle's tree comes from the cache
or from the proposer, whichever predicts more accepted tokens. The choice depends only on past cycles, and a
tree of the cache has one-hot distributions. So every verifier stays lossless.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor

from treespec.draft.auto.builder import AutoBuilder
from treespec.draft.auto.cost import CostBy
from treespec.draft.builders import TreeBuilder
from treespec.draft.calibration import Calibration, scale_by_sharpness
from treespec.draft.drafter import Frontier, Frontiers, GrowthKey, Proposer, join_states
from treespec.draft.lookup.one_hot import OneHotDrafter
from treespec.draft.pairing import ProposerInfo, check_fit
from treespec.draft.tree_assembly import (
    ForcedDrafter,
    Growth,
    grow_together,
    process_draft_logits,
    to_draft_ids,
)
from treespec.draft.vocabulary import to_target_tokens
from treespec.model.cache import TreeCache
from treespec.sampling.noise import Noise
from treespec.sampling.params import SamplingParams
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree, build_root_tree, to_device
from treespec.verify.scheme import Scheme

MOST_STEPS = 8  # forced tokens that a draft model is run over, with one draft forward for each


@final
class TreeDrafter(ForcedDrafter):
    """Drafts a tree per cycle for each sequence that its proposer observes.

    At temperature 0 the children are the most likely tokens under every scheme: the target's distribution is
    one-hot, so every lossless plan outputs the target's token, and only the set of children matters.

    Attributes:
        states: the builder of each sequence, which keeps what it learns between cycles.
        cache: a suffix cache that drafts for the same sequences, with probabilities; None: none.
        offers: the suffix cache's tree for each sequence in this cycle; None: the proposer drafts.

    Raises:
        InputError: policy and scheme do not go together, or the tree is deeper than the proposer drafts.
    """

    states: list[TreeBuilder]

    def __init__(
        self,
        proposer: Proposer,
        policy: Policy,
        scheme: Scheme,
        calibration: Calibration | None = None,
        times: CostBy | None = None,
        cache: OneHotDrafter | None = None,
    ) -> None:
        has_head = proposer.head is not None
        draft_model = ProposerInfo(has_head, proposer.max_depth, proposer.at_once)
        check_fit(policy, scheme, draft_model)
        self.proposer = proposer
        self.scheme = scheme
        self.calibration = calibration
        self.policy: Policy = policy
        self.sharpness: tuple[float, ...] = ()
        if calibration:
            self.sharpness = calibration.sharpness
        self.times = times
        self.now = time.perf_counter
        self.cache = cache
        self.states = [self._build_tree_builder()]

    @torch.no_grad()
    def draft_trees(
        self,
        roots: Tensor,
        distributions: Sequence[Sampler],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        self.forced = [distribution.list_forced_tokens() for distribution in distributions]
        self.distributions = distributions
        self.now = now
        self.paths: list[list[Path]] = [[] for _ in distributions]
        self.kept_logits: list[dict[Path, Tensor]] = [
            {} for _ in distributions
        ]  # see `draft_logits`
        self.depths = dict[
            int, int
        ]()  # depth of each sequence's frontier, whose children come next
        self.noise: Tensor | None = None  # [B, D, N] of all levels; None: drawn level by level

        # 1. The suffix cache's trees, and the sequences that the proposer does not draft for in this cycle.
        root_tokens = roots.tolist()
        device = generators[0].device
        self.offers = [
            self._offer_cache_tree(row, root, device) for row, root in enumerate(root_tokens)
        ]
        pauses = [
            offer is not None
            or builder.should_skip_cycle(sampler.params, len(root_tokens))
            or forced.ends
            for offer, builder, sampler, forced in zip(
                self.offers, self.states, distributions, self.forced, strict=True
            )
        ]

        # 2. Draft logits for the children of the roots.
        root_logits: list[Tensor | None] = [None] * len(root_tokens)
        if not all(pauses):
            started = now()
            root_logits = self.proposer.begin(roots, cache)
            self.forward_seconds += now() - started
        root_logits = [
            None if pause else row for pause, row in zip(pauses, root_logits, strict=True)
        ]

        # 3. Grow the trees in draft tokens, the root apart; sequences with equal settings grow together.
        logits = [row for row in root_logits if row is not None]
        noises = [sampler.noise for sampler in distributions if sampler.noise]
        params = distributions[0].params
        apart = any(sampler.processors or sampler.wants_draft_logits for sampler in distributions)
        apart = apart or any(forced.ids for forced in self.forced)
        apart = apart or self.proposer.at_once or len(logits) < len(root_tokens)
        if noises:  # on a CPU noise is drawn level by level
            same = len(noises) == len(root_tokens) and all(
                sampler.params == params for sampler in distributions
            )
            apart = apart or not same or device.type == "cpu"
        self.alike = alike = self.policy.reranks and not apart and len(root_tokens) > 1

        def grown(
            ends: Tensor, logits: Sequence[Tensor | None], noise: Tensor | None
        ) -> list[TokenTree]:
            self.noise = noise
            if alike:  # the trees depend only on draft logits and noise
                batch_logits = torch.stack([row for row in logits if row is not None])
                batch_roots, self.depths[0] = to_device(ends[:, None], batch_logits.device), -1
                score_params = params if noise is None else SamplingParams(1.0)
                scores = self._score_logits(0, batch_logits)
                growths = [self.states[0].grow(batch_roots, scores, score_params, generators[0])]
            else:
                by_row = zip(to_device(ends, device).split(1), logits, generators, strict=True)
                growths = [self._start_growth(row, *parts) for row, parts in enumerate(by_row)]
            trees = grow_together(self.extend, growths)
            vocabulary = self.proposer.vocabulary
            if vocabulary is None:
                return trees
            return [to_target_tokens(tree, vocabulary, self.proposer.vocab_size) for tree in trees]

        # 4. Use a CUDA graph if the trees depend on nothing but its inputs and key.
        noise = None if apart or not noises else self._get_noise(noises)
        greedy = self.scheme.deterministic or all(
            sampler.params.greedy for sampler in distributions
        )
        graph_keys = (
            [builder.build_graph_key() for builder in self.states] if greedy and not apart else []
        )
        if graph_keys and all(graph_keys):
            policies = tuple(policy for policy in graph_keys if policy)
            noise_params = None
            if noises:
                noise_params = params
            key = GrowthKey(policies, noise_params)
            trees = self.proposer.grow_by_graph(grown, roots, logits, noise, key)
        else:
            ends = torch.tensor(list(map(self.end, range(len(root_tokens)), root_tokens)))
            if all(pauses):
                trees = list(map(build_root_tree, to_device(ends, device).split(1)))
            else:
                trees = grown(ends, root_logits, noise)
        if alike:
            (tree,) = trees
            parts = zip(tree.tokens, tree.parents, tree.depth, tree.ancestors, strict=True)
            trees = [TokenTree(*part) for part in parts]
        preferred = [offer or tree for offer, tree in zip(self.offers, trees, strict=True)]
        return self.prepend_forced_all(roots, preferred, generators)

    def _offer_cache_tree(self, row: int, root: int, device: torch.device) -> TokenTree | None:
        """Returns the suffix cache's tree if it predicts more than the draft model, else None.

        root: the token of the sequence's root.
        """
        forced = self.forced[row]
        if not self.cache or forced.ends:
            return None
        guess = self.cache.guess(row, [root, *forced.ids])
        nodes = 1 + len(guess.tokens)
        choice = self.states[row].choice
        if nodes > 1 and choice.should_use_cache(guess.score, nodes, self.cache.cost):
            return guess.build_token_tree(self.end(row, root), device)
        return None

    def _start_growth(
        self, row: int, root: Tensor, logits: Tensor | None, generator: torch.Generator
    ) -> Growth:
        """Grows a sequence's tree.

        root: [1] int64, the last forced token if there is one. logits: [1, N] draft logits of the sequence's next
        token; None: it has no drafts in this cycle.
        """
        if logits is None:
            return build_root_tree(root)
        builder = self.states[row]
        proposer = self.proposer
        chain = self.forced[row].ids
        sampler = self.distributions[row]
        root = root.to(logits.device)

        # 1. The draft model is run over the forced tokens. If it cannot be, nothing is drafted.
        deepest = proposer.max_depth
        levels = len(chain) + self.policy.max_depth
        if chain:
            chain_tokens = to_draft_ids(chain, proposer.vocabulary, logits.device)
            too_deep = deepest is not None and levels > deepest
            if len(chain) > MOST_STEPS or too_deep or chain_tokens is None:
                return build_root_tree(root)
            for token in chain_tokens.split(1):
                logits = yield Frontier(token, torch.zeros_like(token))

        # 2. The tree below them. Processors may change its draft logits, and a caller may want to keep them.
        if sampler.processors or sampler.wants_draft_logits:
            self.paths[row] = [tuple(chain)]
            logits = self._process_logits(row, logits)
        ahead = None
        if proposer.at_once:
            ahead = partial(self._score_all_levels, row)
        params = sampler.params
        if sampler.noise:
            params = SamplingParams(1.0)  # `_score_logits` applies the sampling parameters
        self.depths[row] = len(chain) - 1
        scores = self._score_logits(row, logits)
        return (yield from builder.grow(root, scores, params, generator, ahead))

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        """Drafts one level of all trees, times it, and applies logits processors and noise."""
        started = self.now()
        logits = self.proposer.extend(frontiers)
        self.forward_seconds += self.now() - started
        for row, frontier in enumerate(frontiers):
            if frontier and (parent_paths := self.paths[row]):
                tokens = frontier.tokens
                if self.proposer.vocabulary is not None:
                    tokens = self.proposer.vocabulary[tokens]
                links = zip(frontier.parent_rows.tolist(), tokens.tolist(), strict=True)
                self.paths[row] = [(*parent_paths[parent], token) for parent, token in links]
                logits[row] = self._process_logits(row, logits[row])
            if row in self.depths:
                logits[row] = self._score_logits(row, logits[row])
        return logits

    def _score_logits(self, row: int, logits: Tensor) -> Tensor:
        """Sharpens draft logits [F, N] and adds the level's noise, if the sequence has noise.

        For trees that grow together logits are [B, 1, N] at the roots and then [B F, N].
        """
        sampler = self.distributions[row]
        self.depths[row] = depth = self.depths[row] + 1
        logits = self._sharpen_logits(row, logits, depth)
        if not sampler.noise:
            return logits
        if self.noise is None:
            return sampler.score_tokens(logits, depth, self.proposer.vocabulary)
        rows = slice(None) if self.alike else slice(row, row + 1)
        noise = self.noise[rows, depth, None]  # [sequences, 1, N]
        by_sequence = logits.reshape(len(noise), -1, logits.shape[-1])
        return sampler.add_noise(by_sequence, noise).reshape(logits.shape)

    def _sharpen_logits(self, row: int, logits: Tensor, depth: int) -> Tensor:
        """Multiplies draft logits by the calibration's factor of a depth, above temperature 0."""
        params = self.distributions[row].params
        if params.greedy:
            return logits
        return scale_by_sharpness(logits, depth, self.sharpness)

    def _get_noise(self, noises: Sequence[Noise]) -> Tensor:
        """Returns [B, D, N] the noise of all levels that a tree may have."""
        depth = self.policy.max_depth
        vocabulary = self.proposer.vocabulary
        levels: list[Tensor] = []
        for sequence_noise in noises:
            levels += map(sequence_noise.get_level, range(depth))
        noise = torch.stack(levels)  # [B D, V]
        if vocabulary is not None:
            noise = noise[:, vocabulary]
        return noise.unflatten(0, (-1, depth))

    def _score_all_levels(self, row: int) -> Tensor:
        """Returns [D, N] draft logits, with noise if there is any, of all levels of a sequence's tree."""
        chain_length = len(self.forced[row].ids)
        sampler = self.distributions[row]
        levels = []
        for depth, logits in enumerate(
            self.proposer.compute_all_levels(row)[chain_length:].split(1), chain_length
        ):
            scores = self._sharpen_logits(row, logits, depth)
            if sampler.noise:
                scores = sampler.score_tokens(scores, depth, self.proposer.vocabulary)
            levels.append(scores)
        return torch.cat(levels)

    def _process_logits(self, row: int, logits: Tensor) -> Tensor:
        """Applies a sequence's logits processors to the draft logits [F, N] of the children of `paths`."""
        sampler = self.distributions[row]
        paths = self.paths[row]
        vocabulary = self.proposer.vocabulary
        shaped = process_draft_logits(sampler, paths, logits, vocabulary, self.proposer.vocab_size)
        if sampler.wants_draft_logits:
            self.kept_logits[row].update(zip(paths, shaped.in_target, strict=True))
        return shaped.in_draft

    def draft_logits(self, row: int) -> dict[Path, Tensor]:
        return self.kept_logits[row]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.proposer.aux_layers

    @property
    def timed(self) -> bool:
        return self.policy.timed

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.proposer.observe(features, tokens)
        if self.cache:
            self.cache.observe(features, tokens)

    def update(self, paths: Sequence[Sequence[int]]) -> None:
        for row, path in enumerate(paths):
            if not self.offers[row]:
                builder = self.states[row]
                chain_length = len(self.forced[row].ids)
                if self.cache:
                    builder.choice.update(len(path), builder.seconds)
                builder.update([node - chain_length for node in path[chain_length:]])

    def rewind(self, lengths: Sequence[int]) -> None:
        self.proposer.rewind(lengths)
        self.states = [self._build_tree_builder() for _ in lengths]
        if self.cache:
            self.cache.rewind(lengths)

    def enter(self, memory: str | None) -> None:
        if self.cache:
            self.cache.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        if self.cache:
            self.cache.remember(memory, answer)

    def new(self) -> "TreeDrafter":
        cache = None
        if self.cache:
            cache = self.cache.new()
        proposer = self.proposer.new()
        return TreeDrafter(proposer, self.policy, self.scheme, self.calibration, self.times, cache)

    def join(self, others: Sequence["TreeDrafter"], row: int | None = None) -> None:
        self.states = join_states(self.states, [drafter.states for drafter in others], row)
        self.proposer.join([drafter.proposer for drafter in others], row)
        if self.cache:
            self.cache.join([drafter.cache for drafter in others if drafter.cache], row)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.proposer.select(rows)
        if self.cache:
            self.cache.select(rows)

    def _build_tree_builder(self) -> TreeBuilder:
        builder_class = TreeBuilder
        if self.policy.timed:
            builder_class = AutoBuilder
        return builder_class(self.policy, self.scheme, self.calibration, self.times)
