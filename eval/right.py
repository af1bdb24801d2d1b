"""Right answers: a suite's checks on all completions, and their share next to the baseline's."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from scipy.stats import binomtest

from treespec.eval.bootstrap import Figure
from treespec.eval.common import Step
from treespec.eval.ledger import Completion, Ledger
from treespec.eval.suites.checks import Check

Z = 1.959964  # standard errors to either end of a 95 % interval
Verdicts = dict[tuple[str, int | str], bool]  # by contestant and question


class Right(TypedDict):
    """How often one contestant is right.

    answers: checked ones. right: the right ones among them. share: right by answers, with Wilson's
    interval. difference: the share less the baseline's. same: questions on which the baseline's
    verdict is the same. Both are None for the baseline itself.
    """

    answers: int
    right: int
    share: Figure
    difference: Figure | None
    same: int | None


def judge(
    ledger: Ledger,
    checks: Mapping[int | str, Check],
    run_code: bool,
    report: Callable[[Step], None],
) -> None:
    """Check the last turn of every completion that was not checked before, and keep the verdicts.

    checks: by question; another check than before judges its completions again. run_code: also take
    checks that run what the target wrote. The same words to the same question are checked once.
    """
    # 1. Earlier verdicts.
    digests = {i: hashlib.sha256(repr(check).encode()).hexdigest() for i, check in checks.items()}
    done = {(e["contestant"], e["question_id"]): e for e in ledger.of("checked")}

    # 2. Those of the other completions.
    asked: list[Completion] = ledger.of("completion")
    by_words: dict[tuple[int | str, str], bool] = {}
    for number, completion in enumerate(asked):
        i, name = completion["question_id"], completion["contestant"]
        if i not in checks or (checks[i].runs_code and not run_code):
            continue
        words, before = (i, completion["turns"][-1]), done.get((name, i), {})
        if before.get("check") == digests[i]:
            by_words[words] = before["right"]
            continue
        if words not in by_words:
            report(Step(number, len(asked), f"checking the answer to {i}"))
            by_words[words] = checks[i].right(completion["turns"][-1])
        fields = {"contestant": name, "question_id": i, "check": digests[i]}
        ledger.append("checked", fields | {"right": by_words[words]})


def verdicts(ledger: Ledger) -> Verdicts:
    """Whether a completion is right, by the latest check; empty where nothing was checked."""
    return {(e["contestant"], e["question_id"]): e["right"] for e in ledger.of("checked")}


def right_of(
    judged: Verdicts,
    mine: Mapping[int | str, Completion],
    base: Mapping[int | str, Completion] | None,
    questions: Sequence[int | str],
) -> Right | None:
    """The figures of one contestant over questions that were checked on both sides."""

    def known(by_id: Mapping[int | str, Completion]) -> dict[int | str, bool | None]:
        return {i: judged.get((by_id[i]["contestant"], i)) for i in questions}

    ours, theirs = known(mine), known(mine if base is None else base)
    both = [i for i in questions if ours[i] is not None and theirs[i] is not None]
    if not both:
        return None
    others = None if base is None else [bool(theirs[i]) for i in both]
    return right_figures([bool(ours[i]) for i in both], others)


def right_figures(mine: Sequence[bool], base: Sequence[bool] | None) -> Right:
    """The figures of one contestant. base: the baseline's verdicts on the same questions, in order."""
    equal = None if base is None else sum(a == b for a, b in zip(mine, base, strict=True))
    return {
        "answers": len(mine),
        "right": sum(mine),
        "share": wilson(sum(mine), len(mine)),
        "difference": None if base is None else paired_difference(mine, base),
        "same": equal,
    }


def wilson(right: int, answers: int) -> Figure:
    """The share of right answers and its 95 % interval (Wilson 1927), which 0 and 1 have too."""
    limits = binomtest(right, answers).proportion_ci(method="wilson")
    return {"value": right / answers, "low": float(limits.low), "high": float(limits.high)}


def paired_difference(mine: Sequence[bool], base: Sequence[bool]) -> Figure:
    """The share less the baseline's on the same questions, and its 95 % interval.

    The interval is that of Agresti and Min (2005) for matched pairs: Wald's after half an answer is
    added to each of the four kinds of pairs. So it has a width even where no verdict differs.
    """
    # 1. The pairs on which the verdicts differ.
    gained = sum(ours and not theirs for ours, theirs in zip(mine, base, strict=True))
    lost = sum(theirs and not ours for ours, theirs in zip(mine, base, strict=True))

    # 2. The interval around the shrunken difference.
    total = len(mine) + 2
    middle = (gained - lost) / total
    half = Z * math.sqrt(((gained + lost + 1) / total - middle**2) / total)
    value = (gained - lost) / len(mine)
    return {"value": value, "low": max(middle - half, -1.0), "high": min(middle + half, 1.0)}
