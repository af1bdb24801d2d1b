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

from treespec.draft.asking import AskingSchedule
from treespec.draft.auto.builder import AutoBuilder
from treespec.draft.auto.cost import CostBy
from treespec.draft.auto.cost_model import can_pay_in_cache
from treespec.draft.builders import TreeBuilder
from treespec.draft.calibration import Calibration
from treespec.draft.cycle import Batching, DraftCycle
from treespec.draft.drafter import Drafter, GrowthKey, Proposer, RowHolder
from treespec.draft.forced import ForcedChains, list_forced_chains
from treespec.draft.lookup.one_hot import OneHotDrafter
from treespec.draft.pairing import ProposerInfo, check_fit
from treespec.draft.postponed import Observation, Postponed
from treespec.model.cache import TreeCache
from treespec.sampling.noise import Noise
from treespec.sampling.params import SamplingParams
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.shape import Policy
from treespec.trees.tree import TokenTree
from treespec.verify.scheme import Scheme


@final
class TreeDrafter(Drafter):
    """Drafts a tree per cycle for each sequence that its proposer observes.

    At temperature 0 the children are the most likely tokens under every scheme: the target's distribution is
    one-hot, so every lossless plan outputs the target's token, and only the set of children matters.

    Attributes:
        states: the builder of each sequence, which keeps what it learns between cycles.
        cache: a suffix cache that drafts for the same sequences, with probabilities; None: none.
        cycle: the present cycle, which `draft_trees` begins.
        rests: whether the proposer drafted nothing for any sequence in the last cycle.
        asking: which cycles of a batch draft.
        sleeps: whether no sequence is asked in the present cycle.
        postponed: what `observe` was given while the proposer rests.
        postponed_for_cache: what it was given while the drafter sleeps; None without a suffix cache.

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
        draft_model = ProposerInfo(has_head, proposer.max_depth, proposer.foresees)
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
        self.rests = False
        self.asking = AskingSchedule()
        self.sleeps = False
        self.postponed = Postponed(proposer)
        self.postponed_for_cache: Postponed | None = None
        if cache:
            self.postponed_for_cache = Postponed(cache)

    @torch.no_grad()
    def draft_trees(
        self,
        roots: Tensor,
        distributions: Sequence[Sampler],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        # 1. The cycle, and the trees of the suffix cache.
        chains = list_forced_chains(roots, distributions)
        cycle = DraftCycle(
            proposer=self.proposer,
            builders=self.states,
            sharpness=self.sharpness,
            max_levels=self.policy.max_depth,
            chains=chains,
            samplers=distributions,
            generators=generators,
            now=now,
        )
        self.cycle = cycle
        self.sleeps = self._can_sleep(chains) and not self.asking.begin_cycle()
        if self.sleeps:
            self.rests = True
            for builder in self.states:
                builder.pass_cycle()
            return cycle.build_undrafted_trees()
        self._choose_cached_trees(cycle)

        # 2. Draft logits for the children of the roots, and the trees below them.
        root_logits = self._begin_drafts(cycle, roots, cache)
        self.rests = all(logits is None for logits in root_logits)
        if self.rests:
            trees = cycle.build_undrafted_trees()
        else:
            trees = self._grow_trees(cycle, roots, root_logits)
        self.forward_seconds += cycle.forward_seconds

        # 3. The trees of the suffix cache replace those of the proposer; forced tokens come above them.
        for row, offer in enumerate(cycle.offers):
            if offer:
                trees[row] = offer
        return chains.prepend_to(trees, self.scheme, generators)

    def _can_sleep(self, chains: ForcedChains) -> bool:
        """Whether a cycle may go without drafts. One sequence is asked in each, and so is a tree that is named."""
        if not self.policy.timed or not self.times or self.times(len(self.states)).batch == 1:
            return False
        return not any(forced.ids for forced in chains.forced)

    def _choose_cached_trees(self, cycle: DraftCycle) -> None:
        """Takes the suffix cache's tree for each sequence where it predicts more than the draft model."""
        if not self.cache or not can_pay_in_cache(self.cache.cost):
            return
        assert self.postponed_for_cache
        self.postponed_for_cache.show()
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
        # 1. The sequences for which the proposer drafts, if their drafts together seem worth the time: a draft of
        #    one sequence delays all. Each builder is asked once a cycle.
        batch = len(cycle.samplers)
        on_cpu = cycle.device.type == "cpu"
        length = 0.0  # on an accelerator each other tree would be another graph
        if on_cpu:
            length = sum(cache.lengths) / batch
        gains = {}
        for row, sampler in enumerate(cycle.samplers):
            if cycle.offers[row] is None:
                gains[row] = self.states[row].predict_gain(sampler.params, batch, on_cpu, length)
        mean_gain = sum(gains.values()) / max(len(gains), 1)
        pauses = [True] * batch
        for row in gains:
            is_skipped = self.states[row].should_skip_cycle(mean_gain)
            pauses[row] = is_skipped or cycle.chains.forced[row].ends
        if all(pauses):
            return [None] * batch

        # 2. The draft logits of the others.
        self.postponed.show()
        started = cycle.now()
        root_logits = list(self.proposer.begin(roots, cache))
        cycle.forward_seconds += cycle.now() - started
        for row, pause in enumerate(pauses):
            if pause:
                root_logits[row] = None
        return root_logits

    def _grow_trees(
        self, cycle: DraftCycle, roots: Tensor, root_logits: list[Tensor | None]
    ) -> list[TokenTree]:
        """Grows the trees below the draft logits of `_begin_drafts`, in the target's tokens."""
        batching = self._plan_batching(cycle, root_logits)
        grow = partial(cycle.grow_trees, batching.together)
        if batching.graph_key:
            logits = [row for row in root_logits if row is not None]  # of all sequences
            trees = self.proposer.grow_by_graph(
                grow, roots, logits, batching.noise, batching.graph_key
            )
        else:
            trees = grow(cycle.chains.end_tokens, root_logits, batching.noise)
        if batching.together:
            (tree,) = trees
            parts = zip(tree.tokens, tree.parents, tree.depth, tree.ancestors, strict=True)
            trees = [TokenTree(*part) for part in parts]
        return trees

    def _plan_batching(self, cycle: DraftCycle, root_logits: list[Tensor | None]) -> Batching:
        """Decides whether the trees grow together, and whether a CUDA graph may grow them."""
        if not cycle.is_self_contained(root_logits):
            return Batching()
        samplers = cycle.samplers
        noise = None
        noise_params = None
        if samplers[0].noise:
            noise = self._get_noise([sampler.noise for sampler in samplers if sampler.noise])
            noise_params = samplers[0].params
        together = self.policy.reranks and len(samplers) > 1
        return Batching(together, noise, self._build_graph_key(samplers, noise_params))

    def _build_graph_key(
        self, samplers: Sequence[Sampler], noise_params: SamplingParams | None
    ) -> GrowthKey | None:
        """Returns what the trees depend on besides draft logits and noise; None: on more, such as draws."""
        is_greedy = all(sampler.params.greedy for sampler in samplers)
        if not is_greedy and not self.scheme.deterministic:
            return None
        policies = []
        for builder in self.states:
            policies.append(builder.build_graph_key())
        known_policies = tuple([policy for policy in policies if policy])
        if len(known_policies) < len(policies):
            return None
        return GrowthKey(known_policies, noise_params)

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

    def draft_logits(self, row: int) -> dict[Path, Tensor]:
        return self.cycle.kept_logits[row]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.proposer.aux_layers

    @property
    def timed(self) -> bool:
        return self.policy.timed

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        observation = Observation(features, tokens)
        self.postponed.add(observation)
        if not self.rests:
            self.postponed.show()
        if self.postponed_for_cache:
            self.postponed_for_cache.add(observation)
            if not self.sleeps:
                self.postponed_for_cache.show()

    def _show_postponed(self) -> None:
        """Shows proposer and suffix cache all that they have not seen."""
        self.postponed.show()
        if self.postponed_for_cache:
            self.postponed_for_cache.show()

    def join(self, others: Sequence["TreeDrafter"], row: int | None = None) -> None:
        for drafter in (self, *others):
            drafter._show_postponed()
        self.rests = False
        super().join(others, row)

    def select(self, rows: Sequence[int]) -> None:
        self._show_postponed()
        super().select(rows)

    def update(self, paths: Sequence[Sequence[int]]) -> None:
        if self.sleeps:
            return
        self.asking.learn(paths)
        for row, path in enumerate(paths):
            if not self.cycle.offers[row]:
                builder = self.states[row]
                chain_length = len(self.cycle.chains.forced[row].ids)
                if self.cache:
                    builder.choice.update(len(path), builder.seconds)
                builder.update([node - chain_length for node in path[chain_length:]])

    def rewind(self, lengths: Sequence[int]) -> None:
        self._show_postponed()
        self.rests = False
        self.asking = AskingSchedule()
        self.sleeps = False
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

    @property
    def row_holders(self) -> list[RowHolder]:
        holders: list[RowHolder] = [self.proposer]
        if self.cache:
            holders.append(self.cache)
        return holders

    def _build_tree_builder(self) -> TreeBuilder:
        builder_class = TreeBuilder
        if self.policy.timed:
            builder_class = AutoBuilder
        return builder_class(self.policy, self.scheme, self.calibration, self.times)
