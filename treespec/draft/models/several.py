"""Several draft models at once (`--drafter model:A+B`): each drafts a tree of its own, and their union is verified.

SpecInfer (Miao et al. 2024, 2305.09781). Sampled draws keep the distribution of the model that made them, and `rrs`
tests each against that one: multi-step speculative sampling. At temperature 0, and with verifiers whose draft tokens
are not drawn (`auto`, `gumbel`, `topk`), only the set of children counts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from treespec.draft.drafter import Drafter, Proposer
from treespec.draft.models.merged_tree import merge_trees
from treespec.draft.models.model import load_draft_model
from treespec.draft.pairing import check_several_models, refuse_suffix_beside_several
from treespec.draft.spec import DrafterSpec
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.sampling.sampler import Path, Sampler
from treespec.trees.shape import Policy
from treespec.trees.static import build_chain
from treespec.trees.tree import TokenTree
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK

DEFAULT_TREE = build_chain(4)  # of each model


@final
class SeveralDrafter(Drafter):
    """Drafts with M draft models. Each grows a tree of the policy; equal paths of their trees become one.

    Attributes:
        drafters: one for each model.
    """

    def __init__(
        self,
        proposers: Sequence[Proposer],
        policy: Policy = DEFAULT_TREE,
        scheme: Scheme | None = None,
    ) -> None:
        """Raises InputError if policy and scheme do not go together, or not with several models."""
        if scheme is None:
            scheme = TopK()
        check_several_models(policy, scheme)
        self.policy: Policy = policy
        self.scheme = scheme
        self.drafters = [TreeDrafter(proposer, policy, scheme) for proposer in proposers]
        self.name = f"{len(proposers)} models"

    def new(self) -> "SeveralDrafter":
        return self.build_for(self.policy, self.scheme)

    def build_for(self, tree: Policy | None, scheme: Scheme) -> "SeveralDrafter":
        if tree is None:
            tree = DEFAULT_TREE
        proposers = [drafter.proposer.new() for drafter in self.drafters]
        return SeveralDrafter(proposers, tree, scheme)

    @property
    def row_holders(self) -> list[TreeDrafter]:
        return self.drafters

    @property
    def models(self) -> list[nn.Module]:
        models: list[nn.Module] = []
        for drafter in self.drafters:
            models += drafter.proposer.models
        return models

    def draft_trees(
        self,
        roots: Tensor,
        distributions: Sequence[Sampler],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        trees_by_model = []
        for drafter in self.drafters:
            trees_by_model.append(drafter.draft_trees(roots, distributions, generators, cache, now))
        self.forward_seconds = sum(drafter.forward_seconds for drafter in self.drafters)
        return merge_trees(trees_by_model)

    def draft_logits(self, row: int) -> dict[Path, Tensor]:
        by_path: dict[Path, list[Tensor]] = {}
        for drafter in self.drafters:
            for path, logits in drafter.draft_logits(row).items():
                by_path.setdefault(path, []).append(logits)
        return {path: torch.stack(rows) for path, rows in by_path.items()}

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for drafter in self.drafters:
            drafter.observe(features, tokens)

    def rewind(self, lengths: Sequence[int]) -> None:
        for drafter in self.drafters:
            drafter.rewind(lengths)


def load_draft_models(spec: DrafterSpec, target: Target) -> Proposer | SeveralDrafter:
    """Loads the draft model of `--drafter model:A`, or those of `model:A+B`. Raises InputError."""
    if len(spec.places) > 1:
        refuse_suffix_beside_several(spec)
    proposers = []
    for place in spec.places:
        proposers.append(load_draft_model(replace(spec, place=place), target))
    if len(proposers) == 1:
        return proposers[0]
    return SeveralDrafter(proposers)
