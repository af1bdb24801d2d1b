"""A regeneration: rows are answered and kept one by one; a killed one goes on where it was."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, final

from treespec.errors import InputError
from treespec.files.atomic import locked
from treespec.files.lines import Lines, opened
from treespec.text.conversations import read_conversations
from treespec.train.regenerate.answers import Local
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.endpoint import Endpoint
from treespec.train.regenerate.own_questions import own_rows
from treespec.train.regenerate.record import check_record, record_of
from treespec.train.regenerate.rows import (
    Answer,
    Answered,
    Row,
    in_order,
    is_greedy,
    passing,
    rows_of,
)

OUT, LEFT_OUT = "conversations.jsonl", "left-out.jsonl"
UNFINISHED, QUESTIONS = "unfinished.jsonl", "questions.jsonl"
BLOCK = 16  # batches of rows that are sorted by length together, and answered before the next ones


class Answerer(Protocol):
    """What answers rows: the target here, or a server. tokens, answers: how many there are so far."""

    tokens: int
    answers: int

    def answered(self, rows: Sequence[Answered]) -> Iterator[Answered]:
        """The rows, all greedy or none, each time that one has another answer or nothing more to ask."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a run is. done: conversations, of `total`. rate: tokens a second. left: seconds, None at first."""

    done: int
    total: int
    rate: float
    left: float | None

    @property
    def text(self) -> str:
        if self.left is None:
            return "conversations"
        minutes, seconds = divmod(round(self.left), 60)
        hours, minutes = divmod(minutes, 60)
        return f"conversations, {self.rate:,.1f} tokens/s, {hours}:{minutes:02d}:{seconds:02d} left"


@dataclass(frozen=True)
class Result:
    """What OUT holds in the end. left_out: conversations without an answer, by reason."""

    path: Path
    conversations: int
    tokens: int
    left_out: Counter[str]

    def __str__(self) -> str:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in self.left_out.most_common())
        left_out = f"; {self.left_out.total()} left out ({reasons})" if reasons else ""
        return f"{self.conversations:,} conversations, {self.tokens:,} tokens of answers in {self.path}{left_out}"


def regenerate(
    config: RegenerateConfig,
    report: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Answer the rows that have no answer yet.

    Writes OUT/conversations.jsonl, OUT/left-out.jsonl with reasons and OUT/config.json; OUT/unfinished.jsonl while it
    runs; with --from-template OUT/questions.jsonl. say: is told what is known of the data. Raises InputError for
    input that cannot be used, and where OUT holds rows of other options or models.
    """
    out, record, data = Path(config.out), *record_of(config, say)
    with locked(out):
        with (
            opened(out / OUT) as kept,
            opened(out / LEFT_OUT) as left_out,
            opened(out / UNFINISHED) as unfinished,
        ):
            begun = any(lines.done for lines in (kept, left_out, unfinished))
            check_record(out / "config.json", record, begun)
            work = Work(config, kept, left_out, unfinished, report)
            if data is not None:
                rows = rows_in(config, data, say)
            else:
                with opened(out / QUESTIONS) as questions:
                    rows = own_rows(work.local.spec, config, questions)
            work.on(rows)
        (out / UNFINISHED).unlink(missing_ok=True)
        return result_of(out / OUT, kept, left_out)


def rows_in(config: RegenerateConfig, data: Path, say: Callable[[str], None]) -> list[Row]:
    """The rows that are asked, in their order. Raises InputError where there is none."""
    conversations, report = read_conversations(data, answered=False)
    say(f"{data}: {report}")
    rows = rows_of(conversations, config.turns)
    asked = [row for row in (passing(row, config.filter) for row in rows) if row]
    say(f"{len(asked):,} different conversations pass --filter {config.filter}")
    if not asked:
        raise InputError(
            f"--filter {config.filter} leaves no question of {data}: take another filter"
        )
    return in_order(asked, config.seed, config.part)[: config.limit]


@final
class Work:
    """Rows on their way into the files of a run."""

    def __init__(
        self,
        config: RegenerateConfig,
        kept: Lines,
        left_out: Lines,
        unfinished: Lines,
        report: Callable[[Progress], None],
    ) -> None:
        """unfinished: the answers of rows that have further questions."""
        self.config, self.kept, self.left_out, self.unfinished = config, kept, left_out, unfinished
        self.report = report

    @cached_property
    def local(self) -> Local:
        """The target, loaded when it is asked for."""
        from treespec.api.load import load_options

        return Local(load_options(self.config), self.config)

    def on(self, rows: Sequence[Row]) -> None:
        """Answer the rows that are not in the files."""
        # 1. what is left
        done = {line.get("row") for line in (*self.kept.done, *self.left_out.done)}
        waiting = self._begun([row for row in rows if row.key not in done])
        there = len(rows) - len(waiting)
        questions = sum(len(one.row.questions) - len(one.answers) for one in waiting)
        self.report(Progress(there, len(rows), 0.0, None))
        if not waiting:
            return
        answerer: Answerer = Endpoint(self.config) if self.config.endpoint else self.local
        started = time.perf_counter()

        # 2. block by block, so that the first rows of a run are a sample of all
        for block in blocks(waiting, BLOCK * self.config.batch):
            for one in answerer.answered(block):
                finished = self._keep(one)
                there += finished
                if one.problem:
                    questions -= len(one.row.questions) - len(one.answers)
                seconds = time.perf_counter() - started
                left = seconds * max(0.0, questions / max(answerer.answers, 1) - 1)
                self.report(Progress(there, len(rows), answerer.tokens / seconds, left))

    def _begun(self, rows: Sequence[Row]) -> list[Answered]:
        """The rows, with the answers that a run before had for them."""
        known = {
            (line["row"], line["turn"]): Answer(*line["answer"]) for line in self.unfinished.done
        }
        begun = []
        for row in rows:
            one = Answered(row, is_greedy(row, self.config.seed, self.config.greedy))
            while answer := known.get((row.key, len(one.answers))):
                one = one.taking(answer)
            begun.append(one)
        return begun

    def _keep(self, one: Answered) -> bool:
        """Write what is new of a row. Returns whether it is finished."""
        if finished := one.next_question is None:
            lines, line = (self.kept if one.answers else self.left_out), line_of(one, self.config)
        else:
            answer = [*asdict(one.answers[-1]).values()]
            lines, line = (
                self.unfinished,
                {"row": one.row.key, "turn": len(one.answers) - 1, "answer": answer},
            )
        lines.append(line)
        lines.done.append(line)
        return finished


def blocks(rows: Sequence[Answered], size: int) -> Iterator[list[Answered]]:
    """Blocks of rows, of each first those that are answered at temperature 0, then the others."""
    for first in range(0, len(rows), size):
        block = rows[first : first + size]
        for greedy in (True, False):
            if group := [one for one in block if one.greedy == greedy]:
                yield group


def line_of(one: Answered, config: RegenerateConfig) -> dict[str, Any]:
    """A line of conversations.jsonl, or of left-out.jsonl where no question could be answered."""
    line: dict[str, Any] = {"id": one.row.source, "row": one.row.key}
    if one.answers:
        temperature = 0.0 if one.greedy else config.temperature
        tokens, ended = (
            [answer.tokens for answer in one.answers],
            [answer.ended for answer in one.answers],
        )
        line |= {
            "messages": one.messages,
            "temperature": temperature,
            "tokens": tokens,
            "ended": ended,
        }
    return line | ({"problem": one.problem} if one.problem else {})


def result_of(path: Path, kept: Lines, left_out: Lines) -> Result:
    tokens = sum(sum(line["tokens"]) for line in kept.done)
    return Result(
        path, len(kept.done), tokens, Counter(str(line.get("problem")) for line in left_out.done)
    )
