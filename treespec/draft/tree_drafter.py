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
from treespec.draft.cycle import Batching, DraftCycle
from treespec.draft.drafter import Drafter, Frontier, Frontiers, GrowthKey, Proposer, join_states
from treespec.draft.forced import list_forced_chains, to_draft_ids
from treespec.draft.lookup.one_hot import OneHotDrafter
from treespec.draft.pairing import ProposerInfo, check_fit
from treespec.draft.tree_assembly import Growth, grow_together, process_draft_logits
from treespec.draft.vocabulary import to_target_tokens
from treespec.model.cache import TreeCache
from treespec.sampling.noise import Noise
from treespec.sampling.params import SamplingParams
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree, build_root_tree, to_device
from treespec.verify.scheme import Scheme

MOST_STEPS = 8  # forced tokens that a draft model is run over, with one draft forward for each
# Of draft logits to which a sequence's sampling parameters and noise are already applied.
SCORED_PARAMS = SamplingParams(1.0)


@final
class TreeDrafter(Drafter):
    """Drafts a tree per cycle for each sequence that its proposer observes.

    At temperature 0 the children are the most likely tokens under every scheme: the target's distribution is
    one-hot, so every lossless plan outputs the target's token, and only the set of children matters.

    Attributes:
        states: the builder of each sequence, which keeps what it learns between cycles.
        cache: a suffix cache that drafts for the same sequences, with probabilities; None: none.
        cycle: the present cycle, which `draft_trees` begins.

    Raises:
        InputError: policy and scheme do not go together, or the tree is deeper than the proposer drafts.
    """

    states: list[TreeBuilder]
    cycle: DraftCycle

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
        # 1. What holds in this cycle, and the trees of the suffix cache.
        chains = list_forced_chains(roots, distributions)
        cycle = DraftCycle(chains, distributions, generators, now)
        self.cycle = cycle
        self._offer_cached_trees(cycle)

        # 2. Draft logits for the children of the roots, and the trees below them.
        root_logits = self._begin_drafts(cycle, roots, cache)
        if all(logits is None for logits in root_logits):
            trees = cycle.build_undrafted_trees()
        else:
            trees = self._grow_trees(cycle, roots, root_logits)

        # 3. The trees of the suffix cache replace those of the proposer; forced tokens come above them.
        for row, offer in enumerate(cycle.offers):
            if offer:
                trees[row] = offer
        return chains.prepend_to(trees, self.scheme, generators)

    def _offer_cached_trees(self, cycle: DraftCycle) -> None:
        """Takes the suffix cache's tree for each sequence where it predicts more than the draft model."""
        if not self.cache:
            return
        for row, forced in enumerate(cycle.chains.forced):
            if forced.ends:
                continue
            guess = self.cache.guess(row, cycle.chains.list_last_tokens(row))
            nodes = 1 + len(guess.tokens)
            choice = self.states[row].choice
            if nodes > 1 and choice.should_use_cache(guess.score, nodes, self.cache.cost):
                end = cycle.chains.ends[row]
                cycle.offers[row] = guess.build_token_tree(end, cycle.device)

    def _begin_drafts(
        self, cycle: DraftCycle, roots: Tensor, cache: TreeCache
    ) -> list[Tensor | None]:
        """Returns [1, N] draft logits for the children of each root; None: the proposer drafts nothing there."""
        # 1. The sequences for which the proposer does not draft. Each builder is asked once a cycle.
        batch = len(cycle.samplers)
        pauses = []
        for row, sampler in enumerate(cycle.samplers):
            pause = cycle.offers[row] is not None
            if not pause:
                pause = self.states[row].should_skip_cycle(sampler.params, batch)
            pauses.append(pause or cycle.chains.forced[row].ends)
        if all(pauses):
            return [None] * batch

        # 2. The draft logits of the others.
        started = cycle.now()
        root_logits = list(self.proposer.begin(roots, cache))
        self.forward_seconds += cycle.now() - started
        for row, pause in enumerate(pauses):
            if pause:
                root_logits[row] = None
        return root_logits

    def _grow_trees(
        self, cycle: DraftCycle, roots: Tensor, root_logits: list[Tensor | None]
    ) -> list[TokenTree]:
        """Grows the trees below the draft logits of `_begin_drafts`, in the target's tokens."""
        batching = self._plan_batching(cycle, root_logits)
        grow = partial(self._grow_below, cycle, batching)
        if batching.graph_key:
            logits = [row for row in root_logits if row is not None]  # of all sequences
            trees = self.proposer.grow_by_graph(
                grow, roots, logits, batching.noise, batching.graph_key
            )
        else:
            trees = grow(torch.tensor(cycle.chains.ends), root_logits, batching.noise)
        if batching.together:
            (tree,) = trees
            parts = zip(tree.tokens, tree.parents, tree.depth, tree.ancestors, strict=True)
            trees = [TokenTree(*part) for part in parts]
        return trees

    def _plan_batching(self, cycle: DraftCycle, root_logits: list[Tensor | None]) -> Batching:
        """Decides whether the trees grow together, and whether a CUDA graph may grow them."""
        if not self._are_pure(cycle, root_logits):
            return Batching()
        samplers = cycle.samplers
        noise = None
        noise_params = None
        if samplers[0].noise:
            noise = self._get_noise([sampler.noise for sampler in samplers if sampler.noise])
            noise_params = samplers[0].params
        together = self.policy.reranks and len(samplers) > 1
        greedy = all(sampler.params.greedy for sampler in samplers)
        policies = []
        if greedy or self.scheme.deterministic:
            policies = [builder.build_graph_key() for builder in self.states]
        known_policies = tuple([policy for policy in policies if policy])
        graph_key = None
        if len(known_policies) == len(samplers):
            graph_key = GrowthKey(known_policies, noise_params)
        return Batching(together, noise, graph_key)

    def _are_pure(self, cycle: DraftCycle, root_logits: list[Tensor | None]) -> bool:
        """Whether every tree depends only on draft logits, and on noise with the same parameters for all."""
        if self.proposer.at_once:
            return False
        samplers = cycle.samplers
        noisy = 0
        for row, sampler in enumerate(samplers):
            if root_logits[row] is None or cycle.chains.forced[row].ids:
                return False
            if sampler.processors or sampler.wants_draft_logits:
                return False
            noisy += bool(sampler.noise)
        if not noisy:
            return True
        if cycle.device.type == "cpu":  # there noise is drawn level by level
            return False
        return noisy == len(samplers) and all(
            sampler.params == samplers[0].params for sampler in samplers
        )

    def _grow_below(
        self,
        cycle: DraftCycle,
        batching: Batching,
        ends: Tensor,
        logits: Sequence[Tensor | None],
        noise: Tensor | None,
    ) -> list[TokenTree]:
        """Grows the trees; those that grow together are one tree of tensors [B, ...] (`Proposer.grow_by_graph`).

        Args:
            cycle: the present one.
            batching: how they grow.
            ends: [B] int64, the token below which each is drafted.
            logits: [1, N] draft logits of each one's first level; None: no drafts.
            noise: [B, D, N] of all levels; None: without noise, or drawn level by level.
        """
        # 1. The growths: one, or one for each sequence.
        cycle.batching = batching
        cycle.noise = noise
        cycle.vocabulary = self.proposer.vocabulary
        if batching.together:
            growths = [self._start_joint_growth(cycle, ends, logits)]
        else:
            ends = to_device(ends, cycle.device)
            growths = []
            for row, row_logits in enumerate(logits):
                growths.append(self._start_growth(cycle, row, ends[row : row + 1], row_logits))

        # 2. Level by level, in draft tokens.
        trees = grow_together(partial(self._extend_level, cycle), growths)
        if cycle.vocabulary is None:
            return trees
        vocab_size = self.proposer.vocab_size
        return [to_target_tokens(tree, cycle.vocabulary, vocab_size) for tree in trees]

    def _start_joint_growth(
        self, cycle: DraftCycle, ends: Tensor, logits: Sequence[Tensor | None]
    ) -> Growth:
        """Grows the trees of all sequences together; they depend only on draft logits and noise."""
        batch_logits = torch.stack([row for row in logits if row is not None])  # [B, 1, N]
        batch_roots = to_device(ends[:, None], batch_logits.device)
        cycle.depths[0] = -1
        params = cycle.samplers[0].params
        if cycle.noise is not None:
            params = SCORED_PARAMS
        scores = self._score_logits(cycle, 0, batch_logits)
        return self.states[0].grow(batch_roots, scores, params, cycle.generators[0])

    def _start_growth(
        self, cycle: DraftCycle, row: int, root: Tensor, logits: Tensor | None
    ) -> Growth:
        """Grows a sequence's tree.

        root: [1] int64, the last forced token if there is one. logits: [1, N] draft logits of the sequence's next
        token; None: it has no drafts in this cycle.
        """
        if logits is None:
            return build_root_tree(root)
        chain = cycle.chains.forced[row].ids
        sampler = cycle.samplers[row]
        root = root.to(logits.device)

        # 1. The draft model is run over the forced tokens. If it cannot be, nothing is drafted.
        if chain:
            chain_tokens = to_draft_ids(chain, cycle.vocabulary, logits.device)
            if chain_tokens is None or self._is_too_long(chain):
                return build_root_tree(root)
            for token in chain_tokens.split(1):
                logits = yield Frontier(token, torch.zeros_like(token))

        # 2. The tree below them. Processors may change its draft logits, and a caller may want to keep them.
        if sampler.processors or sampler.wants_draft_logits:
            cycle.paths[row] = [tuple(chain)]
            logits = self._process_logits(cycle, row, logits)
        ahead = None
        if self.proposer.at_once:
            ahead = partial(self._score_all_levels, cycle, row)
        params = sampler.params
        if sampler.noise:
            params = SCORED_PARAMS
        cycle.depths[row] = len(chain) - 1
        scores = self._score_logits(cycle, row, logits)
        return (
            yield from self.states[row].grow(root, scores, params, cycle.generators[row], ahead)
        )

    def _is_too_long(self, chain: Sequence[int]) -> bool:
        """Whether the draft model is not run over these forced tokens and a tree below them."""
        max_depth = self.proposer.max_depth
        levels = len(chain) + self.policy.max_depth
        return len(chain) > MOST_STEPS or (max_depth is not None and levels > max_depth)

    def _extend_level(self, cycle: DraftCycle, frontiers: Frontiers) -> list[Tensor]:
        """Drafts one level of all trees, times it, and applies logits processors and noise."""
        started = cycle.now()
        logits = self.proposer.extend(frontiers)
        self.forward_seconds += cycle.now() - started
        for row, frontier in enumerate(frontiers):
            if frontier is None:
                continue
            if cycle.paths[row]:
                cycle.extend_paths(row, frontier)
                logits[row] = self._process_logits(cycle, row, logits[row])
            if row in cycle.depths:
                logits[row] = self._score_logits(cycle, row, logits[row])
        return logits

    def _score_logits(self, cycle: DraftCycle, row: int, logits: Tensor) -> Tensor:
        """Sharpens draft logits [F, N] and adds the level's noise, if the sequence has noise.

        For trees that grow together logits are [B, 1, N] at the roots and then [B F, N].
        """
        sampler = cycle.samplers[row]
        depth = cycle.depths[row] + 1
        cycle.depths[row] = depth
        logits = self._sharpen_logits(sampler, logits, depth)
        if not sampler.noise:
            return logits
        if cycle.noise is None:
            return sampler.score_tokens(logits, depth, cycle.vocabulary)
        rows = slice(row, row + 1)
        if cycle.batching.together:
            rows = slice(None)
        noise = cycle.noise[rows, depth, None]  # [sequences, 1, N]
        by_sequence = logits.reshape(len(noise), -1, logits.shape[-1])
        return sampler.add_noise(by_sequence, noise).reshape(logits.shape)

    def _sharpen_logits(self, sampler: Sampler, logits: Tensor, depth: int) -> Tensor:
        """Multiplies draft logits by the calibration's factor of a depth, above temperature 0."""
        if sampler.params.greedy:
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

    def _score_all_levels(self, cycle: DraftCycle, row: int) -> Tensor:
        """Returns [D, N] draft logits, with noise if there is any, of all levels of a sequence's tree."""
        chain_length = len(cycle.chains.forced[row].ids)
        sampler = cycle.samplers[row]
        rows = self.proposer.compute_all_levels(row)[chain_length:].split(1)
        levels = []
        for depth, logits in enumerate(rows, chain_length):
            scores = self._sharpen_logits(sampler, logits, depth)
            if sampler.noise:
                scores = sampler.score_tokens(scores, depth, cycle.vocabulary)
            levels.append(scores)
        return torch.cat(levels)

    def _process_logits(self, cycle: DraftCycle, row: int, logits: Tensor) -> Tensor:
        """Applies a sequence's logits processors to the draft logits [F, N] of the children of its `paths`."""
        sampler = cycle.samplers[row]
        paths = cycle.paths[row]
        vocab_size = self.proposer.vocab_size
        shaped = process_draft_logits(sampler, paths, logits, cycle.vocabulary, vocab_size)
        if sampler.wants_draft_logits:
            cycle.kept_logits[row].update(zip(paths, shaped.in_target, strict=True))
        return shaped.in_draft

    def draft_logits(self, row: int) -> dict[Path, Tensor]:
        return self.cycle.kept_logits[row]

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
            if not self.cycle.offers[row]:
                builder = self.states[row]
                chain_length = len(self.cycle.chains.forced[row].ids)
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
