"""What the tests of a certificate find, and its entries for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespec.eval.certify import statistics


@dataclass(frozen=True)
class StatisticalResult:
    """The result of a statistical test.

    name: the question that it answers. samples: the numbers, pairs or texts that it read. error: the probability that
    it fails a right decoder. finds: the smallest fault that it finds with probability `statistics.POWER`; None if
    nobody can say. p_value: of the samples. worst_sample: fields of the sample that shows most of a fault.
    """

    name: str
    samples: int
    error: float
    finds: float | None
    p_value: float
    worst_sample: Mapping[str, Any] | None = None

    @property
    def passed(self) -> bool:
        return bool(self.p_value >= self.error)

    def to_json(self) -> dict[str, Any]:
        """The test's entry in the certificate."""
        entry = {
            "test": self.name,
            "samples": self.samples,
            "error": self.error,
            "finds": self.finds,
            "power": statistics.TEST_POWER,
            "p_value": self.p_value,
            "passed": self.passed,
        }
        if self.worst_sample is not None:
            entry["shown_by"] = dict(self.worst_sample)
        return entry


def judge_greedy(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The certificate's entry for greedy outputs: they must be equal, but for rounding.

    outputs: each as `treespec.eval.certify.samples.describe_difference` describes it.
    """
    return {
        "test": "greedy answers are the plain ones, token for token",
        "answers": len(outputs),
        "different": [output for output in outputs if output["different_at"] is not None],
        "passed": all(output["explained"] for output in outputs),
    }


def concat_numbers(
    samples: Sequence[Mapping[str, Tensor]], names: Iterable[str]
) -> dict[str, Tensor]:
    """The numbers of all samples for each question that has any. samples: the numbers of each, by question."""
    numbers = {}
    for name in names:
        parts = [sample[name] for sample in samples if name in sample]
        if sum(map(len, parts)):
            numbers[name] = torch.cat(parts)
    return numbers
