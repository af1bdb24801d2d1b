"""Results of a certificate's tests, and their entries in its JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treespec.eval.certify import statistics


@dataclass(frozen=True)
class StatisticalResult:
    """The result of a statistical test.

    Attributes:
        name: the claim that is tested.
        samples: how many numbers, pairs or texts were tested.
        error: probability that the test fails a correct decoder.
        finds: the smallest fault that it finds with probability `statistics.TEST_POWER`; None if that is not known.
        p_value: probability of samples at least as extreme, if the decoder is correct.
        worst_sample: fields of the sample that shows the fault most clearly; None if the test passed.
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
        """Make the test's entry in the certificate."""
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
    """Make the certificate's entry for greedy outputs: every difference must be explained by rounding.

    outputs: the fields of `treespec.eval.certify.samples.describe_difference` for each output.
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
    """Concatenate the statistics of all samples by test; tests without any are left out.

    samples: test name -> statistics, of each sample. names: the tests.
    """
    numbers = {}
    for name in names:
        parts = [sample[name] for sample in samples if name in sample]
        if sum(map(len, parts)):
            numbers[name] = torch.cat(parts)
    return numbers
