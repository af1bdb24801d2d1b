"""`DraftCycle`: one cycle of `TreeDrafter`, which grows a tree for each of B sequences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor

from treespec.draft.builders import TreeBuilder
from treespec.draft.calibration import get_sharpness, scale_by_sharpness
from treespec.draft.drafter import Frontier, Frontiers, GrowthKey, Proposer
from treespec.draft.forced import ForcedChains, to_draft_ids
from treespec.draft.tree_assembly import Growth, grow_together, process_draft_logits
from treespec.draft.vocabulary import (
    to_target_tokens,
    to_target_tokens_by_text,
    to_target_tokens_on_host,
)
from treespec.kernels import ops as kernels
from treespec.sampling.params import SamplingParams
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.tree import TokenTree, build_root_tree, to_device

MOST_STEPS = 8  # forced tokens that a draft model is run over, with one draft forward for each


@lru_cache(64)
def build_score_params(params: SamplingParams) -> SamplingParams:
    """Returns the parameters that turn scores into Pr(the target chooses a token).

    Scores are log q / T with shared noise. The head's log q errs by as much at every temperature T, so a lead
    over the next token counts in units of log q: times T. At T = 1 the softmax of scores is right about as often
    as it says, and above 1 it is left as it is.

        log q, T = 0.5      -0.4   -1.2           the head's own .69 .31
        scores, no noise    -0.8   -2.4           softmax .83 .17: too sure
        scores times T      -0.4   -1.2           softmax .69 .31
    """
    return SamplingParams(1 / min(params.temperature, 1.0))


def can_score_by_kernel(sampler: Sampler, logits: Tensor) -> bool:
    """Whether the kernels add a sequence's noise to draft logits [F, N]: on a CPU, without cuts of the tail."""
    params = sampler.params
    is_cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    if sampler.noise is None or is_cut or params.greedy:
        return False
    if not logits.is_cpu or logits.dtype not in kernels.BFLOAT16_FLAGS:
        return False
    return logits.is_contiguous() and kernels.load_kernels() is not None


@dataclass(frozen=True)
class Batching:
    """How the trees of a cycle grow.

    Attributes:
        together: whether all grow as one tree of tensors [B, ...]; else each grows for itself, a level of all
            at a time.
        noise: [B, D, N] of all levels that a tree may have; None: without noise, or drawn level by level.
        graph_key: all that the trees depend on besides draft logits and noise, so that a CUDA graph may grow
            them; None: no graph.
    """

    together: bool = False
    noise: Tensor | None = None
    graph_key: GrowthKey | None = None


@dataclass
class DraftCycle:
    """One cycle of B sequences. The lists have an entry for each sequence.

    Attributes:
        proposer: computes the draft logits.
        builders: of the sequences' trees.
        sharpness: factors of the draft logits by depth (`treespec.draft.calibration.Calibration`).
        max_levels: the largest number of levels of a tree.
        chains: the roots and forced tokens.
        samplers: of the sequences.
        generators: of their draws.
        now: the clock in seconds that times forwards.
        forward_seconds: seconds spent in the proposer's forwards.
        offers: the suffix cache's trees; None: the proposer drafts.
        paths: the path of each frontier node, in the target's tokens; empty if processors do not need them.
        kept_logits: [V] processed draft logits by path, for a listener (`Drafter.draft_logits`).
        depths: by row, the depth of the frontier whose children come next. Trees that grow together are row 0.
        together: whether all trees grow as one (`Batching`).
        on_host: whether each tree grows for itself on a CPU where no graph records it: numpy may rank its nodes.
        noise: [B, D, N] of all levels; None: without noise, or drawn level by level.
        vocabularies: [N] of each sequence, the target's token for each draft token; None: all V, in order.
    """

    proposer: Proposer
    builders: Sequence[TreeBuilder]
    sharpness: tuple[float, ...]
    max_levels: int
    chains: ForcedChains
    samplers: Sequence[Sampler]
    generators: Sequence[torch.Generator]
    now: Callable[[], float]
    forward_seconds: float = 0.0
    offers: list[TokenTree | None] = field(init=False)
    paths: list[list[Path]] = field(init=False)
    kept_logits: list[dict[Path, Tensor]] = field(init=False)
    depths: dict[int, int] = field(default_factory=dict)
    together: bool = False
    on_host: bool = False
    noise: Tensor | None = None
    vocabularies: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        batch = len(self.samplers)
        self.offers = [None] * batch
        self.paths = [[] for _ in range(batch)]
        self.kept_logits = [{} for _ in range(batch)]

    @property
    def device(self) -> torch.device:
        return self.generators[0].device

    def build_undrafted_trees(self) -> list[TokenTree]:
        """Builds the offered trees; a sequence without one gets the end of its chain, without children."""
        ends = to_device(self.chains.end_tokens, self.device).split(1)
        trees = []
        for offer, end in zip(self.offers, ends, strict=True):
            trees.append(offer or build_root_tree(end))
        return trees

    def is_self_contained(self, root_logits: Sequence[Tensor | None]) -> bool:
        """Whether every tree depends only on draft logits, and on noise with the same parameters for all.

        root_logits: of each sequence; None: the proposer does not draft for it.
        """
        if self.proposer.at_once or self.builders[0].policy.at_once:
            return False
        params = self.samplers[0].params
        noises = 0
        is_uniform = True
        for row, sampler in enumerate(self.samplers):
            if root_logits[row] is None or self.chains.forced[row].ids:
                return False
            if sampler.processors or sampler.wants_draft_logits:
                return False
            noises += sampler.noise is not None
            is_uniform = is_uniform and sampler.params == params
        if not noises:
            return True
        if self.device.type == "cpu":  # there noise is drawn level by level
            return False
        return is_uniform and noises == len(self.samplers)

    def grow_trees(
        self,
        together: bool,
        ends: Tensor,
        logits: Sequence[Tensor | None],
        noise: Tensor | None,
    ) -> list[TokenTree]:
        """Grows the trees, in the target's tokens; those that grow together are one tree of tensors [B, ...].

        A CUDA graph may record it (`Proposer.grow_by_graph`).

        Args:
            together: whether all trees grow as one.
            ends: [B] int64, the token below which each is drafted.
            logits: [1, N] draft logits of each one's first level; None: no drafts.
            noise: [B, D, N] of all levels; None: without noise, or drawn level by level.
        """
        # 1. The growths: one, or one for each sequence.
        self.together = together
        self.on_host = (
            self.device.type == "cpu" and not together and not self.proposer.records_graphs
        )
        self.noise = noise
        self.vocabularies = list(map(self.proposer.get_vocabulary, range(len(logits))))
        if together:
            growths = [self._start_joint_growth(ends, logits)]
        else:
            ends = to_device(ends, self.device)
            growths = []
            for row, row_logits in enumerate(logits):
                growths.append(self._start_growth(row, ends[row : row + 1], row_logits))

        # 2. Level by level, in draft tokens.
        trees = grow_together(self._extend_level, growths)
        vocabularies = [tokens for tokens in self.vocabularies if tokens is not None]
        if not vocabularies:
            return trees
        vocab_size = self.proposer.vocab_size
        if together:
            return [to_target_tokens_by_text(trees[0], vocabularies, vocab_size)]
        convert = to_target_tokens
        if self.on_host:
            convert = to_target_tokens_on_host
        converted = []
        for tree, vocabulary in zip(trees, vocabularies, strict=True):
            converted.append(convert(tree, vocabulary, vocab_size))
        return converted

    def _start_joint_growth(self, ends: Tensor, logits: Sequence[Tensor | None]) -> Growth:
        """Grows the trees of all sequences together; they depend only on draft logits and noise."""
        batch_logits = torch.stack([row for row in logits if row is not None])  # [B, 1, N]
        batch_roots = to_device(ends[:, None], batch_logits.device)
        self.depths[0] = -1
        params = self.samplers[0].params
        if self.noise is not None:
            params = build_score_params(params)
        scores = self._score_logits(0, batch_logits)
        return self.builders[0].grow(batch_roots, scores, params, self.generators[0])

    def _start_growth(self, row: int, root: Tensor, logits: Tensor | None) -> Growth:
        """Grows a sequence's tree.

        root: [1] int64, the last forced token if there is one. logits: [1, N] draft logits of the sequence's next
        token; None: it has no drafts in this cycle.
        """
        if logits is None:
            return build_root_tree(root)
        chain = self.chains.forced[row].ids
        sampler = self.samplers[row]
        root = root.to(logits.device)

        # 1. The draft model is run over the forced tokens. If it cannot be, nothing is drafted.
        if chain:
            if self._is_too_long(chain):
                return build_root_tree(root)
            chain_tokens = to_draft_ids(chain, self.vocabularies[row], logits.device)
            if chain_tokens is None:
                return build_root_tree(root)
            for token in chain_tokens.split(1):
                logits = yield Frontier(token, torch.zeros_like(token))

        # 2. The tree below them. Processors may change its draft logits, and a caller may want to keep them.
        if sampler.processors or sampler.wants_draft_logits:
            self.paths[row] = [tuple(chain)]
            logits = self._process_logits(row, logits)
        ahead = None
        if self.proposer.foresees:
            ahead = partial(self._score_all_levels, row)
        params = sampler.params
        if sampler.noise:
            params = build_score_params(params)
        self.depths[row] = len(chain) - 1
        scores = self._score_logits(row, logits)
        builder = self.builders[row]
        generator = self.generators[row]
        return (yield from builder.grow(root, scores, params, generator, ahead, self.on_host))

    def _is_too_long(self, chain: Sequence[int]) -> bool:
        """Whether the draft model is not run over these forced tokens and a tree below them."""
        max_depth = self.proposer.max_depth
        levels = len(chain) + self.max_levels
        return len(chain) > MOST_STEPS or (max_depth is not None and levels > max_depth)

    def _extend_level(self, frontiers: Frontiers) -> list[Tensor]:
        """Drafts one level of all trees, times it, and applies logits processors and noise."""
        started = self.now()
        logits = self.proposer.extend(frontiers)
        self.forward_seconds += self.now() - started
        for row, frontier in enumerate(frontiers):
            if frontier is None:
                continue
            if self.paths[row]:
                self._extend_paths(row, frontier)
                logits[row] = self._process_logits(row, logits[row])
            if row in self.depths:
                logits[row] = self._score_logits(row, logits[row])
        return logits

    def _extend_paths(self, row: int, frontier: Frontier) -> None:
        """Replaces a sequence's paths by those of its next frontier."""
        tokens = frontier.tokens
        vocabulary = self.vocabularies[row]
        if vocabulary is not None:
            tokens = vocabulary[tokens]
        parent_paths = self.paths[row]
        paths = []
        for parent, token in zip(frontier.parent_rows.tolist(), tokens.tolist(), strict=True):
            paths.append((*parent_paths[parent], token))
        self.paths[row] = paths

    def _score_logits(self, row: int, logits: Tensor) -> Tensor:
        """Sharpens draft logits [F, N] and adds the level's noise, if the sequence has noise.

        For trees that grow together logits are [B, 1, N] at the roots and then [B F, N].
        """
        sampler = self.samplers[row]
        depth = self.depths[row] + 1
        self.depths[row] = depth
        if self.noise is None and can_score_by_kernel(sampler, logits):
            assert sampler.noise
            vocabulary = self.vocabularies[row]
            if vocabulary is None:
                noise = sampler.noise.get_level(depth)
            else:
                noise = sampler.noise.compute_for_tokens(depth, vocabulary)
            factor = get_sharpness(depth, self.sharpness)
            return kernels.score_tokens(logits, noise, factor, sampler.params.temperature)
        logits = self._scale_logits(sampler, logits, depth)
        if not sampler.noise:
            return logits
        if self.noise is None:
            return sampler.score_tokens(logits, depth, self.vocabularies[row])
        rows = slice(row, row + 1)
        if self.together:
            rows = slice(None)
        noise = self.noise[rows, depth, None]  # [sequences, 1, N]
        by_sequence = logits.reshape(len(noise), -1, logits.shape[-1])
        return sampler.add_noise(by_sequence, noise).reshape(logits.shape)

    def _scale_logits(self, sampler: Sampler, logits: Tensor, depth: int) -> Tensor:
        """Multiplies draft logits by the calibration's factor of a depth, above temperature 0."""
        if sampler.params.greedy:
            return logits
        return scale_by_sharpness(logits, depth, self.sharpness)

    def _score_all_levels(self, row: int) -> Tensor:
        """Returns [D, N] draft logits, with noise if there is any, of all levels of a sequence's tree."""
        chain_length = len(self.chains.forced[row].ids)
        sampler = self.samplers[row]
        rows = self.proposer.compute_all_levels(row)[chain_length:].split(1)
        levels = []
        for depth, logits in enumerate(rows, chain_length):
            scores = self._scale_logits(sampler, logits, depth)
            if sampler.noise:
                scores = sampler.score_tokens(scores, depth, self.vocabularies[row])
            levels.append(scores)
        return torch.cat(levels)

    def _process_logits(self, row: int, logits: Tensor) -> Tensor:
        """Applies a sequence's logits processors to the draft logits [F, N] of the children of its `paths`."""
        sampler = self.samplers[row]
        paths = self.paths[row]
        vocab_size = self.proposer.vocab_size
        shaped = process_draft_logits(sampler, paths, logits, self.vocabularies[row], vocab_size)
        if sampler.wants_draft_logits:
            self.kept_logits[row].update(zip(paths, shaped.in_target, strict=True))
        return shaped.in_draft
