"""Trees for a page: a short answer of each configuration, traced after the measurement is over.

OUT/trees.json keeps a few cycles of each. The page is made from it, so that a finished measurement
needs no models to show them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from treespec.api.spec import Spec
from treespec.api.trace import trace
from treespec.errors import InputError
from treespec.eval.page.setup import machine
from treespec.eval.questions import Question
from treespec.files.atomic import read_json, write_json
from treespec.requests.events import Cycle

FILE = "trees.json"
TOKENS = 40  # of a traced answer, at most
CYCLES = 16  # of a traced answer, at most
AGAIN = "delete it to make the page without tree pictures"


@dataclass(frozen=True)
class Chosen:
    """why: it was chosen."""

    why: str
    cycle: Cycle


@dataclass(frozen=True)
class Said:
    """A piece of the traced answer. first: of its cycle."""

    text: str
    drafted: bool
    first: bool


@dataclass(frozen=True)
class Traced:
    """A traced answer. name: of the configuration. tokens, cycles: of the whole trace."""

    name: str
    temperature: float
    tokens: int
    cycles: int
    answer: list[Said]
    chosen: list[Chosen]

    @property
    def tau(self) -> float:
        return self.tokens / self.cycles


@dataclass(frozen=True)
class Trees:
    """What OUT/trees.json holds. prompt: the message that all traced answers are to."""

    machine: dict[str, str]
    prompt: str
    traced: list[Traced]


def fitting(questions: Sequence[Question], specs: Iterable[Spec]) -> Question | None:
    """The first question that leaves room for an answer; None where there is none, or no spec."""
    for spec in islice(specs, 1):
        for question in questions:
            if len(spec.encode(_prompt(question))) < spec.target.context_length:
                return question
    return None


def _prompt(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.turns[0]}]


def traced(
    name: str, spec: Spec, question: Question, temperature: float, seed: int, **sampling: Any
) -> Traced:
    """Trace a short answer. Its times are no figures: recording slows it down."""
    prompt = _prompt(question)
    options = sampling | {"temperature": temperature, "max_new_tokens": TOKENS, "memory": None}
    cycles = list(islice(trace(spec, prompt, seed=seed, **options), CYCLES))
    answer = [
        Said(piece.text, piece.drafted, first=piece is cycle.answer[0])
        for cycle in cycles
        for piece in cycle.answer
    ]
    tokens = sum(cycle.new_tokens for cycle in cycles)
    return Traced(name, temperature, tokens, len(cycles), answer, chosen(cycles))


def chosen(cycles: Sequence[Cycle]) -> list[Chosen]:
    """Cycles with the longest, the median and the shortest path, where these differ in length."""
    drafted = [cycle for cycle in cycles if len(cycle.tokens) > 1]
    if not drafted:
        return []
    by_length = sorted(drafted, key=lambda cycle: len(cycle.path))
    wanted = {
        "the longest accepted path": max(drafted, key=lambda cycle: len(cycle.path)),
        "the shortest path": by_length[0],
        "the median path": by_length[len(by_length) // 2],
    }
    found: dict[int, Chosen] = {}
    for why, cycle in wanted.items():
        found.setdefault(len(cycle.path), Chosen(why, cycle))
    return sorted(found.values(), key=lambda one: one.cycle.number)


def write_trees(out: Path, question: Question, runs: Iterable[Traced]) -> None:
    write_json(out / FILE, asdict(Trees(machine(), question.turns[0], list(runs))))


def read_trees(out: Path) -> Trees | None:
    """None where nothing was recorded. Raises InputError for a damaged file."""
    if not (out / FILE).exists():
        return None
    fields = read_json(out / FILE, AGAIN)
    try:
        return Trees(**fields | {"traced": [_traced(one) for one in fields["traced"]]})
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{out / FILE} is not understood: {AGAIN}") from error


def _traced(fields: dict[str, Any]) -> Traced:
    answer = [Said(**said) for said in fields["answer"]]
    cycles = [Chosen(one["why"], Cycle.from_json(one["cycle"])) for one in fields["chosen"]]
    return Traced(**fields | {"answer": answer, "chosen": cycles})
