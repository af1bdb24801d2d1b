"""What bench.json holds, part by part.

A `Figure` is {value, low, high}: a median or a ratio of totals, and its 95 % bootstrap interval.
"""

from typing import Literal, TypedDict

from treespec.eval.bootstrap import Figure

Work = Literal["target", "begin", "extend"]
Ratio = Literal["speedup", "bound", "speedup_by_bound"]

RATIOS: tuple[Ratio, ...] = ("speedup", "bound", "speedup_by_bound")


class ForwardTime(TypedDict):
    """One forward in ms.

    what: "target" over a tree of `nodes`; the head's "begin" of a cycle over `nodes` tokens; the
    head's "extend" by a level of `nodes`. context: tokens in the cache.
    """

    what: Work
    nodes: int
    context: int
    ms: Figure


class Overall(TypedDict):
    """Totals over totals of all questions. bound: see `figures.bound`."""

    speedup: Figure
    bound: Figure
    speedup_by_bound: Figure


class CycleFigures(TypedDict):
    """One cycle's times, and the speedup over one-token decoding, prefill left out.

    cycle: ms, the sum of its stages. head to rest: ms of each stage. overhead: the share of a cycle
    outside the forwards. The other figures are medians over questions; acceptance_length (τ) is a
    ratio of totals.
    """

    head: Figure
    rest_of_drafting: Figure
    target: Figure
    verify: Figure
    commit: Figure
    rest: Figure
    cycle: Figure
    overhead: Figure
    tokens_per_second: Figure
    speedup: Figure
    bound: Figure
    speedup_by_bound: Figure
    overall: Overall
    acceptance_length: Figure


class Speed(TypedDict):
    """Tokens/s from prompt to last token, and ratios to transformers' and to one-token decoding's.

    over_generate: None where `model.generate` raised.
    """

    tokens_per_second: Figure
    over_generate: Figure | None
    over_one_token: Figure | None


class SpeedFigures(Speed):
    """Medians over questions; overall: ratios of totals."""

    overall: Speed


class AnswerTime(TypedDict):
    """One question's answer. tokens: new ones. seconds: from prompt to last token."""

    tokens: int
    seconds: float


class RowFigures(TypedDict):
    """One method at one temperature.

    peer: transformers answers, not treespec. failed: the error that a peer raised; it then has no
    figures. same_as_one_token: answers whose tokens are those of one-token decoding, at temperature
    0. cycle: None for peers. undrafted: the share of the cycles without a draft token.
    """

    name: str
    temperature: float
    peer: bool
    failed: str | None
    same_as_one_token: int | None
    speed: SpeedFigures | None
    cycle: CycleFigures | None
    undrafted: float
    answers: list[AnswerTime]


class BatchFigures(TypedDict):
    """Throughput of one method at one temperature and batch size.

    tokens: new tokens of all texts in the last round. tokens_per_second: by the clock, prefill
    included. over_one_token: the ratio to one-token decoding with this batch size.
    over_smallest: the ratio to this method with the smallest batch size.
    """

    name: str
    temperature: float
    batch: int
    tokens: int
    tokens_per_second: Figure
    over_one_token: Figure
    over_smallest: Figure


class BenchResult(TypedDict):
    """The whole file.

    questions: their number. left_out: questions that were not asked, each with its reason.
    """

    config: dict[str, object]
    environment: dict[str, object]
    questions: int
    left_out: list[str]
    forwards: list[ForwardTime]
    rows: list[RowFigures]
    batches: list[BatchFigures]
