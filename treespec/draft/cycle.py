"""`DraftCycle`: what holds for one cycle of `TreeDrafter`, from its roots to the trees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from treespec.draft.drafter import Frontier, GrowthKey
from treespec.draft.forced import ForcedChains
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.tree import TokenTree, build_root_tree, to_device


@dataclass(frozen=True)
class Batching:
    """How the trees of a cycle grow.

    Attributes:
        together: whether all grow as one tree of tensors [B, ...]; else each grows for itself, a level of all
            at a time.
        noise: [B, D, N] of all levels a tree may have; None: without noise, or drawn level by level.
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
        chains: the roots and forced tokens.
        samplers: of the sequences.
        generators: of their draws.
        now: the clock in seconds that times forwards.
        offers: the suffix cache's trees; None: the proposer drafts.
        paths: the path of each frontier node, in the target's tokens; empty if processors do not need them.
        kept_logits: [V] processed draft logits by path, for a listener (`Drafter.draft_logits`).
        depths: by row, the depth of the frontier whose children come next. Trees that grow together are row 0.
        batching: how the trees grow.
        noise: [B, D, N] of all levels, as a graph's input; None: without noise, or drawn level by level.
        vocabulary: [N] the target's token for each draft token; None: all V, in order.
    """

    chains: ForcedChains
    samplers: Sequence[Sampler]
    generators: Sequence[torch.Generator]
    now: Callable[[], float]
    offers: list[TokenTree | None] = field(init=False)
    paths: list[list[Path]] = field(init=False)
    kept_logits: list[dict[Path, Tensor]] = field(init=False)
    depths: dict[int, int] = field(default_factory=dict)
    batching: Batching = Batching()
    noise: Tensor | None = None
    vocabulary: Tensor | None = None

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
        ends = to_device(torch.tensor(self.chains.ends), self.device).split(1)
        trees = []
        for offer, end in zip(self.offers, ends, strict=True):
            trees.append(offer or build_root_tree(end))
        return trees

    def extend_paths(self, row: int, frontier: Frontier) -> None:
        """Replaces a sequence's paths by those of its next frontier."""
        tokens = frontier.tokens
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        parent_paths = self.paths[row]
        paths = []
        for parent, token in zip(frontier.parent_rows.tolist(), tokens.tolist(), strict=True):
            paths.append((*parent_paths[parent], token))
        self.paths[row] = paths
