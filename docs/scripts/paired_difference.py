"""By how much one run's acceptance length exceeds another's on the same questions.

The brackets hold a 95 % bootstrap interval.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("one", help="an answers file of treespec eval")
    parser.add_argument("other", help="an answers file that has the same questions")
    options = parser.parse_args()
    one, other = counts(options.one), counts(options.other)
    # 1. The same questions are resampled on both sides, so that their difficulty cancels.
    chosen = np.random.default_rng(0).integers(0, len(one), (RESAMPLES, len(one)))
    gain = acceptance_length(one) / acceptance_length(other) - 1
    resampled = acceptance_length(one[chosen]) / acceptance_length(other[chosen]) - 1
    low, high = np.percentile(resampled, [2.5, 97.5])
    print(f"{gain:+.0%} ({low:+.0%} to {high:+.0%})")


def counts(file: str) -> NDArray[np.int64]:
    """[questions, 2] new tokens and cycles, ordered by question."""
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    rows.sort(key=lambda row: row["question_id"])
    names = ("new_tokens", "decoding_steps")
    return np.array([[sum(row["choices"][0][name]) for name in names] for row in rows])


def acceptance_length(counted: NDArray[np.int64]) -> NDArray[np.float64]:
    """[...] tokens a cycle over all questions. counted: [..., questions, 2]."""
    totals = counted.sum(-2)
    return totals[..., 0] / totals[..., 1]


if __name__ == "__main__":
    main()
