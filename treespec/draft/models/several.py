"""Several draft models at once (SpecInfer, Miao et al. 2024, 2305.09781, section 3): their draws merge into one tree.

The draws at a node take turns: the first is of the first model, the second of the second, and so on round. A model
goes on from all of them, so that the tree is one. Where tokens are sampled each draw keeps the law that it came from,
which `rrs` answers; where the likeliest are taken the children are the union of each model's own likeliest:

    model 1   a .5  b .3  c .2
    model 2   b .6  a .3  d .1     four draws by turns: a (1), b (2), then c (1), d (2)
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.draft.models.model import ModelProposer
from treespec.draft.proposer import Frontier


@final
class SeveralModels:
    """A proposer whose logits are [F, M, V], of M models."""

    taps: tuple[int, ...] = ()
    max_depth: int | None = None
    vocabulary: Tensor | None = None

    def __init__(self, models: Sequence[ModelProposer]) -> None:
        self.models, self.vocab_size = list(models), models[0].vocab_size

    @property
    def lengths(self) -> list[int]:
        return self.models[0].lengths

    @property
    def identity(self) -> object:
        return [model.identity for model in self.models]

    @property
    def forward_seconds(self) -> float:
        return sum(model.forward_seconds for model in self.models)

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        begun = [model.begin(roots, cache) for model in self.models]
        return list(stacked([[known for known in one if known is not None] for one in begun]))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        return stacked([model.extend(frontiers) for model in self.models])

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for model in self.models:
            model.observe(features, tokens)

    def rewind(self, lengths: Sequence[int]) -> None:
        for model in self.models:
            model.rewind(lengths)

    def new(self) -> "SeveralModels":
        return SeveralModels([model.new() for model in self.models])

    def join(self, others: Sequence["SeveralModels"]) -> None:
        for i, model in enumerate(self.models):
            model.join([other.models[i] for other in others])

    def select(self, rows: Sequence[int]) -> None:
        for model in self.models:
            model.select(rows)


def stacked(logits: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Of each model the [F, V] logits of each text -> of each text [F, M, V]."""
    return [torch.stack(rows, dim=1) for rows in zip(*logits, strict=True)]


def in_turns(logits: Tensor, k: int) -> Tensor:
    """[F, V] scores by whose order k draws are the models' likeliest tokens by turns. logits: [F, M, V].

    A token that a model before has brought gives its turn away to that model's next.
    """
    models, size = logits.shape[1:]
    scores = torch.zeros_like(logits[:, 0])
    finite = logits.clamp_min(torch.finfo(logits.dtype).min)  # padding comes last, but before what is taken
    for draw in range(min(k, size)):
        left = finite[:, draw % models].masked_fill(scores > 0, -torch.inf)
        scores.scatter_(1, left.argmax(-1, keepdim=True), float(k - draw))
    return scores
