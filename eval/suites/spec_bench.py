"""Spec-Bench: 480 questions of six tasks (Xia et al. 2024, 2401.07851).

Its file is in FastChat's format. The task `mt_bench` is MT-Bench with its eight categories; the
other five tasks are categories of their own. `math_reasoning` has problems of GSM8K, asked as they
stand, so treespec can tell which answers are right.
"""

from treespec.eval.suites import gsm8k
from treespec.eval.suites.lines import objects, written

MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
MATH = "math_reasoning"


def jsonl(content: bytes) -> bytes:
    """The questions, each mathematical problem with a check on its number."""
    lines = list(objects(content))
    for line in lines:
        if line["category"] == MATH:
            (answer,) = line["reference"]
            line["check"] = gsm8k.check(answer)
    return written(lines)


def task_of(category: str) -> str:
    """The task that a category belongs to."""
    return "mt_bench" if category in MT_BENCH else category
