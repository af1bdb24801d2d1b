"""A regeneration: rows are answered and kept one by one; a killed one goes on where it was."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from treespec.api.engine import Engine
from treespec.api.load import load_options
from treespec.errors import InputError
from treespec.files.atomic import locked, read_json, write_json
from treespec.files.lines import opened
from treespec.model.identity import target_identity
from treespec.text.conversations import read_conversations
from treespec.text.sources import digest
from treespec.train.data.known import data_file
from treespec.train.record import Record, refuse_changed
from treespec.train.regenerate.ask import Answer, Ask, LeftOut, Messages, of_server, of_target
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.magpie import writer
from treespec.train.regenerate.questions import Row, drawn, rows_of

OUT = "conversations.jsonl"
LEFT_OUT = "left-out.jsonl"
FORMAT = 2  # of config.json
# Options that change no row, only which are answered, how fast and where. Every lossless drafter gives the
# target's distribution, so a head may be added on the way.
FREE = {
    "out",
    "limit",
    "from_template",
    "batch",
    "head",
    "drafter",
    "tree",
    "verifier",
    "device_map",
    "allow_lossy",
    "trust_remote_code",
    "endpoint",
}

Report = Callable[[int, int, str], None]  # conversations done, all of them, and how fast


@dataclass(frozen=True)
class Result:
    """What OUT holds in the end. left_out: conversations without an answer, by reason."""

    path: Path
    conversations: int
    tokens: int
    left_out: Counter[str]

    def __str__(self) -> str:
        reasons = "; ".join(f"{reason}: {count}" for reason, count in self.left_out.most_common())
        left_out = ""
        if reasons:
            left_out = f"; {self.left_out.total()} left out ({reasons})"
        return f"{self.conversations:,} conversations, {self.tokens:,} tokens of answers in {self.path}{left_out}"


def regenerate(
    config: RegenerateConfig,
    report: Report = lambda done, total, pace: None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Answer the rows that have no answer yet.

    Writes OUT/conversations.jsonl, OUT/left-out.jsonl with reasons and OUT/config.json. say: receives
    what is known of the data. Raises InputError for input that cannot be used, and where OUT holds
    rows of other options or models.
    """
    # 1. What a run before has left, if it is of the same options.
    out = Path(config.out)
    data: Path | None = None
    if config.data is not None:
        data = data_file(config.data, say)
    record = describe_regeneration(config, data)
    with locked(out), ExitStack() as stack:
        kept = stack.enter_context(opened(out / OUT))
        left_out = stack.enter_context(opened(out / LEFT_OUT))
        if kept.done or left_out.done:
            before = read_json(out / "config.json", f"delete {out} to begin again", FORMAT)
            refuse_changed(out, before, record, FREE)
        write_json(out / "config.json", record)

        # 2. The rows that are left.
        rows = rows_in(config, data, say)
        waiting = list_waiting(rows, kept.done + left_out.done)
        report(len(rows) - len(waiting), len(rows), "")

        # 3. A thread for each row that is answered at a time; each row is kept as it ends.
        if waiting:
            answer = begin_answering(config, kept.done, stack)
            pool = stack.enter_context(ThreadPool(config.batch))
            pace = Pace(rows=len(rows), waiting=len(waiting))
            for line in pool.imap_unordered(answer, waiting):
                file = left_out
                if "messages" in line:
                    file = kept
                file.append(line)
                pace.count(line)
                report(pace.rows - pace.left, pace.rows, str(pace))

        # 4. What is there now.
        reasons = Counter(str(line["problem"]) for line in left_out.done)
        total = sum(sum(line["tokens"]) for line in kept.done)
        return Result(out / OUT, len(kept.done), total, reasons)


def list_waiting(rows: list[Row], done: list[dict[str, Any]]) -> list[Row]:
    """The rows that no line of OUT has yet. done: its lines."""
    ended = {line["row"] for line in done}
    return [row for row in rows if row.key not in ended]


def describe_regeneration(config: RegenerateConfig, data: Path | None) -> Record:
    """The options of a regeneration with digests of its data and its target: OUT/config.json.

    data: the file of the conversations; None where the target writes the questions.
    """
    record: Record = {"answers_by": "the target"}
    if config.endpoint:
        record["answers_by"] = "a server"
    record |= asdict(config)
    record["format"] = FORMAT
    record["data"] = None
    if data is not None:
        record["data"] = digest(data)
    if config.endpoint is None:
        record["target"] = target_identity(config.target, config.placement)
    return record


def begin_answering(
    config: RegenerateConfig, done: list[dict[str, Any]], stack: ExitStack
) -> Callable[[Row], dict[str, Any]]:
    """Load who answers, and return the function that makes a row's line.

    Args:
        config: the options: a server answers, or the target here.
        done: lines of a run before, whose questions the target does not write again.
        stack: ends the target's engine.
    """
    if config.endpoint:
        return partial(answered, config, of_server(config), None)
    spec = load_options(config)
    engine = stack.enter_context(Engine(spec, batch=config.batch, queue=config.batch))
    write: Callable[[str], str] | None = None
    if config.data is None:
        write = writer(engine, config, done)
    return partial(answered, config, of_target(engine, config), write)


class Pace:
    """How many rows are answered, and how fast. rows: all of them. waiting: those without an answer at first."""

    def __init__(self, rows: int, waiting: int) -> None:
        self.rows = rows
        self.left = waiting
        self.answered = 0
        self.tokens = 0
        self.started = time.perf_counter()

    def count(self, line: dict[str, Any]) -> None:
        """The line of a row that has ended."""
        self.answered += 1
        self.left -= 1
        self.tokens += sum(line.get("tokens", ()))

    def __str__(self) -> str:
        seconds = time.perf_counter() - self.started
        remaining = timedelta(seconds=round(seconds / self.answered * self.left))
        return f", {self.tokens / seconds:,.1f} tokens/s, {remaining} left"


def rows_in(config: RegenerateConfig, data: Path | None, say: Callable[[str], None]) -> list[Row]:
    """The rows that are asked, shuffled by the seed: the first of them are a sample of all.

    Raises InputError where there is none.
    """
    if data is None:
        assert config.from_template is not None  # one of both is there
        rows = []
        for number in range(config.from_template):
            name = f"template-{number}"
            rows.append(Row(key=name, source=name, system=None, questions=()))
    else:
        conversations, report = read_conversations(data, answered=False)
        say(f"{data}: {report}")
        rows = rows_of(conversations, config.turns, config.filter)
        say(f"{len(rows):,} different conversations pass --filter {config.filter}")
        if not rows:
            raise InputError(
                f"--filter {config.filter} leaves no question of {data}: take another filter"
            )
    return sorted(rows, key=lambda row: drawn(config.seed, row.key, "order"))[: config.limit]


def answered(
    config: RegenerateConfig, ask: Ask, write: Callable[[str], str] | None, row: Row
) -> dict[str, Any]:
    """Ask a row's questions one after the other, and return its line of OUT: text and tokens of the answers.

    The line has no messages where the first question has no answer. A problem says why there is none,
    or no further one.

    Args:
        config: the run's options.
        ask: asks who answers.
        write: (key) -> the question of a row; None where the row has its questions.
        row: what is asked.
    """
    greedy = drawn(config.seed, row.key, "greedy") < config.greedy * 2**63
    line: dict[str, Any] = {"id": row.source, "row": row.key}
    messages: Messages = []
    if row.system is not None:
        messages = [{"role": row.system_role, "content": row.system}]
    answers: list[Answer] = []
    try:
        questions = row.questions
        if write is not None:
            questions = (write(row.key),)
        for question in questions:
            asked = messages + [{"role": "user", "content": question}]
            answer = ask(asked, drawn(config.seed, row.key, len(answers)), greedy)
            if not answer.text.strip():  # no reader of the file takes it
                raise LeftOut("an answer is empty")
            answers.append(answer)
            messages = asked + [answer.message]
    except LeftOut as problem:
        line["problem"] = str(problem)
    if answers:
        line["messages"] = messages
        line["temperature"] = config.temperature
        if greedy:
            line["temperature"] = 0.0
        line |= describe_answers(answers)
    return line


def describe_answers(answers: Sequence[Answer]) -> dict[str, Any]:
    """The fields of a line with a value an answer. Token ids are there where all are known."""
    fields: dict[str, Any] = {
        "tokens": [answer.tokens for answer in answers],
        "ended": [answer.ended for answer in answers],
    }
    if all(answer.token_ids for answer in answers):
        fields["input_ids"] = []
        fields["loss_mask"] = []
        for answer in answers:
            prompt = list(answer.prompt_ids)
            written = list(answer.token_ids)
            fields["input_ids"].append(prompt + written)
            fields["loss_mask"].append([0] * len(prompt) + [1] * len(written))
    return fields
