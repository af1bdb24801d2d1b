"""A regeneration: rows are answered and kept one by one; a killed one goes on where it was."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from treespec.errors import InputError
from treespec.files.atomic import locked, read_json, write_json
from treespec.files.lines import Lines, opened
from treespec.model.identity import target_identity
from treespec.text.conversations import read_conversations
from treespec.text.sources import digest
from treespec.train.data.known import data_file
from treespec.train.files.record import Record, changes
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.endpoint import Endpoint
from treespec.train.regenerate.local import Local, own_rows
from treespec.train.regenerate.questions import (
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
FORMAT = 1  # of config.json
# Options that change no row, only which are answered, how fast and where. Every lossless drafter gives the
# target's law, so a head may be added on the way.
FREE = {
    *("out", "limit", "part", "batch", "head", "drafter", "tree", "verifier", "device_map"),
    *("allow_lossy", "trust_remote_code", "endpoint"),
}


Report = Callable[[int, int, str], None]  # conversations done, all of them, and how fast


class Answerer(Protocol):
    """What answers: the target here, or a server."""

    def answers(self, rows: Sequence[Answered]) -> Iterator[tuple[Answered, Answer | str]]:
        """Each row with the answer to its next question, or why there is none."""
        ...


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
    report: Report = lambda done, total, pace: None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Answer the rows that have no answer yet.

    Writes OUT/conversations.jsonl, OUT/left-out.jsonl with reasons and OUT/config.json; OUT/unfinished.jsonl while it
    runs; with --from-template OUT/questions.jsonl. say: is told what is known of the data. Raises InputError for
    input that cannot be used, and where OUT holds rows of other options or models.
    """
    out, data = Path(config.out), None if config.data is None else data_file(config.data, say)
    record = record_of(config, data)
    with locked(out), ExitStack() as stack:
        names = (OUT, LEFT_OUT, UNFINISHED)
        files = Files(*(stack.enter_context(opened(out / name)) for name in names))
        if any(lines.done for lines in (files.kept, files.left_out, files.unfinished)):
            check_record(out / "config.json", record)
        write_json(out / "config.json", record)
        answerer: Answerer | None = Endpoint(config) if config.endpoint else None
        if data is not None:
            rows = rows_in(config, data, say)
        else:
            answerer = local(config)
            questions = stack.enter_context(opened(out / QUESTIONS))
            rows = own_rows(answerer.spec, config, questions)
        waiting = files.waiting(rows, config)
        report(len(rows) - len(waiting), len(rows), "")
        if waiting:
            work(config, waiting, files, answerer or local(config), len(rows), report)
        (out / UNFINISHED).unlink(missing_ok=True)
        reasons = Counter(str(line.get("problem")) for line in files.left_out.done)
        tokens = sum(sum(line["tokens"]) for line in files.kept.done)
        return Result(out / OUT, len(files.kept.done), tokens, reasons)


def local(config: RegenerateConfig) -> Local:
    """The target, loaded."""
    from treespec.api.load import load_options

    return Local(load_options(config), config)


def record_of(config: RegenerateConfig, data: Path | None) -> Record:
    """The options, with digests of target and data under "contents".

    Raises InputError where one of them is not there.
    """
    contents = {}
    if config.endpoint is None:
        contents["target"] = target_identity(config.target, config.placement)
    if data is not None:
        contents["data"] = digest(data)
    by = "a server" if config.endpoint else "the target"
    return {"format": FORMAT, "answers_by": by, **asdict(config), "contents": contents}


def check_record(path: Path, record: Record) -> None:
    """Raises InputError where the rows of a run that has begun are of other options or models."""
    before = read_json(path, f"delete {path.parent} to begin again", FORMAT)
    for name, difference in changes(before, record):
        if name not in FREE:
            raise InputError(
                f"{path.parent} holds rows with {difference}; name another --out, or delete it"
            )


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


@dataclass(frozen=True)
class Files:
    """unfinished: the answers of rows that have further questions."""

    kept: Lines
    left_out: Lines
    unfinished: Lines

    def waiting(self, rows: Sequence[Row], config: RegenerateConfig) -> list[Answered]:
        """The rows that are not finished, with the answers that a run before had for them."""
        done = {line.get("row") for line in (*self.kept.done, *self.left_out.done)}
        known = {
            (line["row"], line["turn"]): Answer(*line["answer"]) for line in self.unfinished.done
        }
        waiting = []
        for row in rows:
            one = Answered(row, is_greedy(row, config.seed, config.greedy))
            while answer := known.get((row.key, len(one.answers))):
                one = one.taking(answer)
            if row.key not in done:
                waiting.append(one)
        return waiting

    def keep(self, one: Answered, temperature: float) -> None:
        """Write what is new of a row. temperature: as for `Answered.line`."""
        line: dict[str, Any] = {"row": one.row.key}
        if one.asks:
            answer = [*asdict(one.answers[-1]).values()]
            lines, line = self.unfinished, line | {"turn": len(one.answers) - 1, "answer": answer}
        else:
            lines, line = (self.kept if one.answers else self.left_out), one.line(temperature)
        lines.append(line)


def work(
    config: RegenerateConfig,
    waiting: list[Answered],
    files: Files,
    answerer: Answerer,
    total: int,
    report: Report,
) -> None:
    """Answer the rows block by block, so that the first rows of a run are a sample of all.

    Of a block all first turns are answered, then all second ones. total: rows with finished ones.
    """
    questions = sum(one.left for one in waiting)
    done, answered, tokens, started = total - len(waiting), 0, 0, time.perf_counter()
    for going in blocks(waiting, BLOCK * config.batch):
        while going:
            further = []
            for row, said in answerer.answers(going):
                if isinstance(said, str):
                    one = row.ending(said)
                else:
                    one = row.taking(said)
                    answered, tokens = answered + 1, tokens + said.tokens
                files.keep(one, config.temperature)
                if one.asks:
                    further.append(one)
                done += not one.asks
                questions -= one.left if one.problem else 0
                seconds = time.perf_counter() - started
                left = timedelta(
                    seconds=round(seconds * max(0.0, questions / max(answered, 1) - 1))
                )
                report(done, total, f", {tokens / seconds:,.1f} tokens/s, {left} left")
            going = further


def blocks(rows: Sequence[Answered], size: int) -> Iterator[list[Answered]]:
    """Blocks of rows, of each first those that are answered at temperature 0, then the others."""
    for first in range(0, len(rows), size):
        block = rows[first : first + size]
        yield [one for one in block if one.greedy]
        yield [one for one in block if not one.greedy]
