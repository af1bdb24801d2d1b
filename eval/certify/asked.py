"""The questions that a certificate asks about sampled texts by themselves."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from treespec.eval.certify.bets import lost
from treespec.eval.certify.numbers import Places, Sample, successive, successive_draws
from treespec.eval.certify.tests import independent, least_correlation, least_gap, uniform

# A statistic: the p-value of numbers, and the smallest fault that n numbers find at an error.
Statistic = tuple[Callable[[Tensor], float], Callable[[int, float], float | None]]
GAP: Statistic = (uniform, least_gap)
PAIRS: Statistic = (independent, least_correlation)
BET: Statistic = (lost, lambda n, error: None)


def all_questions(
    mine: Sequence[Places], ours: Sequence[Sample]
) -> list[tuple[str, Tensor, Statistic]]:
    """The name of each question, its numbers and its statistic.

    A question without meaning for a scheme has no numbers. mine: places of the texts' tokens.
    ours: the texts.
    """
    # 1. The numbers of all texts together.
    cycles = [cycle for text in ours for cycle in text.cycles]
    by_ratio = joined(text.by_ratio for text in mine)
    by_p = joined(text.by_p for text in mine)
    first_by_ratio = joined(text.first_by_ratio for text in mine)
    draws = joined(cycle.draws for cycle in cycles)
    hotter = joined(cycle.hotter for cycle in cycles)
    repeated = joined(cycle.repeated for cycle in cycles)
    rarer = joined(cycle.rarer for cycle in cycles)
    token_pairs = joined(successive(text.by_number) for text in mine)
    cycle_pairs = joined(successive(text.first) for text in mine)
    draw_pairs = joined(successive_draws(text.cycles) for text in ours)

    # 2. The questions.
    return [
        ("tokens follow the target's law, by p/q", by_ratio, GAP),
        ("tokens follow the target's law, by p", by_p, GAP),
        ("first tokens of cycles follow it, by p/q as told", first_by_ratio, GAP),
        ("draws follow the law that they are said to", draws, GAP),
        ("draws are not from a power of that law", hotter, BET),
        ("draws repeat the others at their node as often as they should", repeated, GAP),
        ("draws do not repeat them more often, or less", rarer, BET),
        ("tokens are independent of the token before", token_pairs, PAIRS),
        ("cycles are independent of the cycle before", cycle_pairs, PAIRS),
        ("draws are independent of the draws before", draw_pairs, PAIRS),
    ]


def joined(rows: Iterable[Tensor]) -> Tensor:
    """Tensors of one width as one; an empty one for none."""
    tensors = list(rows)
    return torch.cat(tensors) if tensors else torch.empty(0)
