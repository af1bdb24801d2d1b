"""The last three lines of a command: what it wrote, whether that is good, and the next command.

docs/guide.md states the thresholds; a test compares them.
"""

import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from treespec.api.options import ModelOptions
from treespec.cli.terminal import print_remark
from treespec.demo.known import choose_default_drafter, find_head_for
from treespec.options import format_command_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from treespec.engine.stats import Stats

# τ: tokens per target forward of answers as they were decoded, forwards without drafts included. What `train` predicts
# of a chain is another figure with thresholds of its own (treespec.train.verdict).
GOOD_TAU = 1.3  # with fewer the drafts seldom pay for themselves
GOOD_TRAINING_TOKENS = 1_000_000  # tokens of answers to train on, or of texts to draft from
GOOD_FIRST_DRAFTS = 0.5  # share of first drafts that are the target's choice at temperature 0
GOOD_GAP_POINTS = 1.0  # percentage points of acceptance rate below the optimum α*
# Shift of a probability; a certificate must be able to show a smaller one.
GOOD_SHIFT = 0.05
MIN_JUDGED_TOKENS = 32  # fewer tokens say nothing of τ
MIN_WARNED_TOKENS = 100  # tokens of a conversation before it says that drafts do not pay
MIN_TAU = 1.1  # with less no head pays
MAX_UNDRAFTED_SHARE = 0.9  # of the forwards; with more, `auto` expects no gain from drafts


@dataclass(frozen=True)
class ClosingLines:
    """The three lines that end a command.

    Attributes:
        written: what the command wrote, and where.
        verdict: whether that is good, by a threshold, as `judge` makes it.
        next_command: the command to type next.
    """

    written: str
    verdict: str
    next_command: str


def print_ending(ending: ClosingLines) -> None:
    """Print the three lines on standard error, since results go to standard output."""
    sys.stdout.flush()  # a file that gets both has the results first
    print_remark(ending.written, ending.verdict, f"Next: {ending.next_command}")


def judge(is_good: bool, finding: str) -> str:
    """Format a verdict. finding: the figure and its threshold in words."""
    if is_good:
        return f"Good: {finding}"
    return f"Not good: {finding}"


def judge_tau(tau: float) -> str:
    """Judge tokens per target forward by `GOOD_TAU`."""
    if tau >= GOOD_TAU:
        return judge(True, f"τ {tau:.2f} is at least {GOOD_TAU}")
    return judge(False, f"τ {tau:.2f} is below {GOOD_TAU}")


def judge_training_tokens(tokens: int) -> str:
    """Judge a number of tokens by `GOOD_TRAINING_TOKENS`."""
    relation = "are fewer than"
    if tokens >= GOOD_TRAINING_TOKENS:
        relation = "reach"
    finding = f"{tokens:,} tokens {relation} {GOOD_TRAINING_TOKENS:,}"
    return judge(tokens >= GOOD_TRAINING_TOKENS, finding)


def judge_answers(tokens: int, cycles: int) -> str:
    """Judge the drafts of some answers by their τ, if there are enough tokens."""
    if tokens < MIN_JUDGED_TOKENS:
        return f"Not judged: {tokens} tokens are fewer than {MIN_JUDGED_TOKENS}"
    return judge_tau(tokens / max(cycles, 1))


def explain_cut(stats: "Stats", limit: int) -> str:
    """Explain why an answer broke off. limit: --max-new-tokens."""
    if stats.new_tokens >= limit:
        return f"stopped at {limit} tokens (/max-new-tokens)"
    return "stopped at the end of the model's context (/undo or /reset makes room)"


def explain_no_gain(total: "Stats") -> str:
    """Explain that drafts do not pay; "" if they do, or after too few tokens. total: the figures of all answers."""
    if total.new_tokens < MIN_WARNED_TOKENS:
        return ""
    undrafted_share = total.undrafted / total.cycles
    if undrafted_share > MAX_UNDRAFTED_SHARE:
        return f"The head does not pay here: {undrafted_share:.0%} of the forwards draft nothing, as it would cost time"
    if total.acceptance_length < MIN_TAU:
        return f"The head does not pay here: τ {total.acceptance_length:.2f} is below {MIN_TAU}"
    return ""


def end_answers(config: ModelOptions, written: str, tokens: int, cycles: int) -> ClosingLines:
    """Make the ending of a command that answered: measure good drafts, look for the fault of bad ones.

    Args:
        config: the command's options.
        written: the figures of the answers.
        tokens: number of tokens of the answers.
        cycles: number of target forwards.
    """
    if config.source is None:
        next_command = write_command("generate", ModelOptions, config, drafter="suffix:tokens=0")
        return ClosingLines(written, "Not drafted: one token at a time", next_command)
    return ClosingLines(
        written, judge_answers(tokens, cycles), write_answers_command(config, tokens, cycles)
    )


def write_answers_command(config: ModelOptions, tokens: int, cycles: int) -> str:
    """Write the command to type after some answers."""
    from treespec.eval.config import DoctorConfig, EvalConfig

    is_bad = tokens >= MIN_JUDGED_TOKENS and tokens < GOOD_TAU * cycles
    if is_bad and config.head is not None:
        return write_command("doctor", DoctorConfig, config)
    return write_command("eval", EvalConfig, config, out="runs/eval")


def write_command(
    name: str,
    options: type["DataclassInstance"],
    config: "DataclassInstance",
    **changes: object,
) -> str:
    """Write a command for the models of the present one.

    Args:
        name: the command.
        options: the class of its options.
        config: the options of the present command.
        changes: further options, which win; None leaves one out.
    """
    return format_command_line(name, options, list_model_options(config) | changes)


def list_model_options(config: "DataclassInstance") -> dict[str, object]:
    """The options of a command that name its models, without those that the target `demo` implies."""
    model_options = {field.name for field in fields(ModelOptions)}
    values = {}
    for field in fields(config):
        if field.name in model_options:
            values[field.name] = getattr(config, field.name)
    target = values.get("target")
    if values.get("drafter") == choose_default_drafter(target):
        values["drafter"] = None
    if values.get("head") == find_head_for(target):
        values["head"] = None
    return values
