"""What summary.json and the answer lines of an evaluation hold, part by part.

A `Figure` is {value, low, high}: a ratio of totals over questions and its 95 % bootstrap interval.
"""

from typing import Any, TypedDict

from treespec.eval.bootstrap import Figure
from treespec.eval.common import Stage


class Extra(TypedDict, total=False):
    """What treespec adds to an answer line; FastChat and Spec-Bench skip it.

    seconds: of all turns, by stage. drafted, accepted: tokens by depth in the tree. undrafted:
    cycles without a draft token. The others have one entry per turn. ended: "model", "max_new_tokens" or "context".
    """

    seconds: dict[str, float]
    drafted: list[int]
    accepted: list[int]
    undrafted: int
    prompt_tokens: list[int]
    ended: list[str]
    seeds: list[int]
    token_ids: list[list[int]]


class Figures(TypedDict):
    """What one configuration's answers to some questions come to.

    seconds: by the clock. acceptance_length: τ, tokens per cycle. acceptance_rate_by_depth: α, the
    share of the cycles with an accepted token at the depth above that accepted one at this depth.
    nodes: mean size of the tree of one forward, with its root. undrafted: the share of the cycles
    without a draft token. speedup: tokens/s over the
    baseline's, totals over totals; speedup_by_question: the mean of the questions' ratios.
    cycle_ms, cycle_share: a cycle's time by stage. overhead: the share outside the forwards of
    target and draft model.
    """

    questions: int
    tokens: int
    cycles: int
    seconds: float
    acceptance_length: Figure
    acceptance_rate_by_depth: list[Figure]
    nodes: float
    undrafted: float
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    tokens_per_second: Figure
    speedup: Figure | None
    speedup_by_question: Figure | None
    prefill_seconds: float
    cycle_ms: dict[Stage, float]
    cycle_share: dict[Stage, float]
    overhead: float


class Same(TypedDict):
    """Answers (turns) with the baseline's very tokens, of all."""

    same: int
    answers: int


class Ended(TypedDict):
    """Turns, by what ended them."""

    model: int
    max_new_tokens: int
    context: int


class Right(TypedDict):
    """How often one configuration is right.

    answers: checked ones. right: the right ones among them. share: right by answers, with Wilson's
    interval. difference: the share less the baseline's. same: questions on which the baseline's
    verdict is the same. Both are None for the baseline itself.
    """

    answers: int
    right: int
    share: Figure
    difference: Figure | None
    same: int | None


class Row(TypedDict):
    """One configuration. verifier: "baseline" for one-token decoding.

    categories: figures by category, by task for Spec-Bench. same_as_baseline: at temperature 0.
    of_fastest: tokens/s over those of the fastest lossless pair at this temperature; None for that
    pair. right: None where no answer was checked.
    """

    model_id: str
    drafter: str | None
    verifier: str
    lossless: bool
    tree: str | None
    temperature: float
    overall: Figures
    categories: dict[str, Figures]
    same_as_baseline: Same | None
    of_fastest: Figure | None
    ended: Ended
    right: Right | None


class Again(TypedDict):
    """The baseline's second time (A/A). speedup: over the first, on the questions of both."""

    temperature: float
    questions: int
    speedup: Figure | None


class Summary(TypedDict):
    """The whole of summary.json.

    questions: their number. left_out: what was not asked, with reasons. few_questions: categories
    with too few questions for their intervals. again: the clock's noise at each temperature.
    """

    config: dict[str, Any]
    environment: dict[str, object]
    questions: int
    left_out: list[str]
    few_questions: list[str]
    again: list[Again]
    configurations: list[Row]
