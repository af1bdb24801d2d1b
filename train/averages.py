"""Means of the losses since the last report, over all steps and all processes."""

from typing import final

import torch
from accelerate import Accelerator
from torch import Tensor

from treespec.train.loss import Loss


@final
class Averages:
    """Collects losses on their device; `take` alone waits for them."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def add(self, losses: list[Loss]) -> None:
        """losses: of one step, without gradients. A part may be new: a later draft step."""
        for loss in losses:
            for name, value in ({"total": loss.total} | loss.parts).items():
                self.sums[name] = self.sums.get(name, torch.zeros_like(value)) + value
                self.counts[name] = self.counts.get(name, 0) + 1

    def take(self, accelerator: Accelerator) -> dict[str, float]:
        """The means by name, and begin anew. All processes call it at the same step."""
        if not self.sums:
            return {}
        means = torch.stack(
            [value.to(accelerator.device) / self.counts[name] for name, value in self.sums.items()]
        )
        names = list(self.sums)
        self.sums, self.counts = {}, {}
        values = accelerator.reduce(means, reduction="mean").tolist()
        return {name: round(value, 5) for name, value in zip(names, values, strict=True)}
