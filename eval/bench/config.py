"""The options of `treespec bench`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespec.api.options import (
    FASTEST,
    PER_CATEGORY,
    VERIFIER,
    AnswerOptions,
    DrafterOptions,
    PlacementOptions,
    QuestionOptions,
    TargetOptions,
)
from treespec.errors import InputError
from treespec.eval.common import listed
from treespec.options import MANY, SEEDS, TOKENS, option, shared

if TYPE_CHECKING:
    from treespec.eval.pairs import Pair

CONTEXTS = (128, 1024, 4096)
NODES = (1, 2, 4, 8, 16, 32, 64, 128)  # tree sizes of the timed forwards


@dataclass(frozen=True, kw_only=True)
class BenchConfig(TargetOptions, PlacementOptions, DrafterOptions, QuestionOptions, AnswerOptions):
    """Raises InputError for a number out of its range, and for none or several drafter options."""

    out: str = option("folder for bench.json, report.html and bench.md")
    verifier: str = option(
        f"{VERIFIER}; {FASTEST}; several are separated by commas, and rrs-wo@2x4 names its tree",
        "auto",
    )
    per_category: int | None = option(PER_CATEGORY, None, least=1, most=MANY)
    turns: int = option("ask only the first N turns of each question", 1, least=1, most=MANY)
    temperature: str = option(
        "temperatures, separated by commas; 0 is greedy", "0,1", least=0, most=100
    )
    max_new_tokens: int = shared(AnswerOptions, "max_new_tokens", 64)
    contexts: str | None = option(
        "context lengths of the timed forwards, separated by commas; default: those of 128, 1024 "
        "and 4096 that fit",
        None,
        least=1,
        most=TOKENS,
        whole=True,
    )
    rounds: int = option("times that each forward is timed", 20, least=2, most=10**6)
    batches: str | None = option(
        "batch sizes for a throughput table, separated by commas; default: no such table",
        None,
        least=1,
        most=4096,
        whole=True,
    )
    assistant: str | None = option(
        "smaller model with the same tokenizer, for transformers' assisted generation", None
    )
    seed: int = option(
        "each answer's seed follows from it, the question, the turn and the row",
        0,
        least=0,
        most=SEEDS,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_one_source()


def check_verifiers(config: BenchConfig) -> dict[str, "Pair"]:
    """Drafter, verifier and tree by their names in `--verifier`. Raises InputError for unfit ones."""
    from treespec.eval.pairs import Pair, check_paired, refuse_unfit  # loads numpy

    assert config.source
    named = {}
    for name in listed("verifier", config.verifier):
        verifier, _, tree = name.partition("@")
        named[name] = Pair(config.source, verifier, tree or None)
        check_paired(verifier, tree or None, config.source, config.allow_lossy)
    refuse_unfit(list(named.values()), config.allow_lossy)
    return named


def whole_numbers(name: str, values: str, least: int) -> list[int]:
    """The distinct whole numbers in an option's list, ascending.

    Raises InputError for a part that is no whole number from `least`.
    """
    parts = listed(name, values)
    if bad := [part for part in parts if not (part.isdecimal() and int(part) >= least)]:
        raise InputError(f"--{name} {bad[0]!r} must be a whole number, at least {least}")
    return sorted({int(part) for part in parts})


def contexts_of(config: BenchConfig, context_length: int) -> list[int]:
    """The context lengths of the timed forwards, in tokens, ascending.

    context_length: tokens of the target's context, which must hold the largest tree too. Raises
    InputError for a length without room for it.
    """
    most = context_length - NODES[-1]
    if config.contexts is None:
        return [length for length in CONTEXTS if length <= most]
    lengths = whole_numbers("contexts", config.contexts, 1)
    if lengths[-1] > most:
        raise InputError(
            f"--contexts {lengths[-1]}: the target's context holds {context_length} tokens, "
            f"{NODES[-1]} nodes included; give at most {most}"
        )
    return lengths
