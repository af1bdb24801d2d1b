"""Several draft models at once (SpecInfer, Miao et al. 2024, 2305.09781, section 3): their draws
merge into one tree.

The draws at a node take turns: the first comes from the first model, the second from the second,
and so on round. Every model continues below all of them, so there is one tree. Sampled draws keep
the law they came from, and `rrs` takes a law per draw. Without sampling, the children are the union
of each model's likeliest tokens:

    model 1   a .5  b .3  c .2
    model 2   b .6  a .3  d .1     four draws by turns: a (1), b (2), then c (1), d (2)
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from treespec.draft.models.model import ModelProposer
from treespec.draft.proposer import Frontier, Proposer
from treespec.model.cache import TreeCache


@final
class SeveralModels(Proposer):
    """A proposer whose logits are [F, M, V], of M models."""

    law_per_draw = True

    def __init__(self, proposers: Sequence[ModelProposer]) -> None:
        self.proposers, self.vocab_size = list(proposers), proposers[0].vocab_size

    @property
    def lengths(self) -> list[int]:
        return self.proposers[0].lengths

    @property
    def models(self) -> list[nn.Module]:
        return [model for proposer in self.proposers for model in proposer.models]

    @property
    def identity(self) -> object:
        return [proposer.identity for proposer in self.proposers]

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        begun = [proposer.begin(roots, cache) for proposer in self.proposers]
        return list(stacked([[logits for logits in own if logits is not None] for own in begun]))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        return stacked([proposer.extend(frontiers) for proposer in self.proposers])

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for proposer in self.proposers:
            proposer.observe(features, tokens)

    def rewind(self, lengths: Sequence[int]) -> None:
        for proposer in self.proposers:
            proposer.rewind(lengths)

    def new(self) -> "SeveralModels":
        return SeveralModels([proposer.new() for proposer in self.proposers])

    def join(self, others: Sequence["SeveralModels"]) -> None:
        for i, proposer in enumerate(self.proposers):
            proposer.join([other.proposers[i] for other in others])

    def select(self, rows: Sequence[int]) -> None:
        for proposer in self.proposers:
            proposer.select(rows)


def stacked(logits: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each model's [F, V] logits of each text -> [F, M, V] for each text."""
    return [torch.stack(rows, dim=1) for rows in zip(*logits, strict=True)]
