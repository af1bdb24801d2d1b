"""A tree chosen each cycle by what nodes and levels bring and cost (`treespec.trees.auto`)."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.draft.calibration import COLDEST, nearest
from treespec.draft.grow.grower import Grower, Means
from treespec.draft.grow.growth import Growth
from treespec.draft.grow.likeliest import grow_likeliest
from treespec.draft.grow.settled import Shape, shape_for
from treespec.draft.grow.static import grow_static
from treespec.draft.pace.pace import Pace, Paces
from treespec.shaping.sampling import SamplingParams
from treespec.trees.auto import AutoTree
from treespec.verify.topk import TopK


@final
class AutoGrower(Grower[AutoTree]):
    """paces: what drafting brought to this text and costs; None before the first cycle."""

    def __init__(self, policy: AutoTree, means: Means) -> None:
        super().__init__(policy, means)
        self.paces: Paces | None = None

    @property
    def seconds(self) -> float:
        assert self.paces
        pace = self.paces.present
        return pace.promise.seconds if pace.promise else 1 / pace.plain

    def rests(self, params: SamplingParams, texts: int = 1) -> bool:
        """Where no tree is expected to be faster than one token at a time."""
        self.paces = self.paces or self._new_paces(params.temperature)
        pace = self.paces.among(texts)
        if pace.idle:  # nothing was learned since it was last asked
            return pace.rests(pace.hope)
        shape = self._shape(pace, params)
        if not shape.likeliest:
            return pace.rests(shape.speed)
        pace.start(shape.speed)
        return pace.rests(max(shape.speed, pace.speed))

    def grow(
        self, root: Tensor, logits: Tensor, params: SamplingParams, generator: torch.Generator
    ) -> Growth:
        """The likeliest tokens level by level where that is faster, else a tree settled before
        anything is drafted.
        """
        assert self.paces
        pace = self.paces.present
        shape = self._shape(pace, params)
        if shape.likeliest and pace.speed > shape.speed:
            return grow_likeliest(root, logits, self.policy, params, pace, self.means.calibration)
        pace.promise = shape.promise(pace)
        scheme = TopK() if shape.likeliest else self.means.scheme
        return grow_static(root, logits, shape.tree, scheme, params, generator)

    def feedback(self, path: Sequence[int]) -> None:
        if self.paces:
            self.paces.present.settle(path)

    def _new_paces(self, temperature: float) -> Paces:
        assert self.means.times
        known = self.means.calibration.rates if self.means.calibration else {}
        rates = nearest(known, max(temperature, COLDEST)) if known else None
        return Paces(self.means.times, rates)

    def _shape(self, pace: Pace, params: SamplingParams) -> Shape:
        """The best of the trees whose shape is settled before anything is drafted."""
        scheme = self.means.scheme
        likeliest = params.greedy or scheme.deterministic
        return shape_for(pace, self.policy, 0 if likeliest else scheme.max_draws)
