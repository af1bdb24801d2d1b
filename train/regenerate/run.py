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
from treespec.model.identity import identify_target
from treespec.text.conversations import read_conversations
from treespec.text.sources import hash_source
from treespec.train.data.known import find_data_file
from treespec.train.record import Record, refuse_changed
from treespec.train.regenerate.ask import (
    Ask,
    LeftOut,
    Messages,
    RegeneratedAnswer,
    ask_endpoint,
    ask_target,
)
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.magpie import build_question_writer
from treespec.train.regenerate.questions import QuestionRow, draw_number, list_question_rows

CONVERSATIONS_FILE = "conversations.jsonl"
LEFT_OUT_FILE = "left-out.jsonl"
REGENERATE_FORMAT = 2  # of config.json
# Options that change no row, only which are answered, how fast and where. Every lossless drafter gives the
# target's distribution, so a head may be added on the way.
CHANGEABLE_OPTIONS = {
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
class RegenerationResult:
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


def regenerate_answers(
    config: RegenerateConfig,
    report: Report = lambda done, total, pace: None,
    say: Callable[[str], None] = lambda line: None,
) -> RegenerationResult:
    """Answer the rows that have no answer yet.

    Writes OUT/conversations.jsonl, OUT/left-out.jsonl with reasons and OUT/config.json. say: receives
    what is known of the data. Raises InputError for input that cannot be used, and where OUT holds
    rows of other options or models.
    """
    # 1. What a run before has left, if it is of the same options.
    out = Path(config.out)
    data: Path | None = None
    if config.data is not None:
        data = find_data_file(config.data, say)
    record = describe_regeneration(config, data)
    with locked(out), ExitStack() as stack:
        kept = stack.enter_context(opened(out / CONVERSATIONS_FILE))
        left_out = stack.enter_context(opened(out / LEFT_OUT_FILE))
        if kept.done or left_out.done:
            before = read_json(
                out / "config.json", f"delete {out} to begin again", REGENERATE_FORMAT
            )
            refuse_changed(out, before, record, CHANGEABLE_OPTIONS)
        write_json(out / "config.json", record)

        # 2. The rows that are left.
        rows = load_rows(config, data, say)
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
        return RegenerationResult(out / CONVERSATIONS_FILE, len(kept.done), total, reasons)


def list_waiting(rows: list[QuestionRow], done: list[dict[str, Any]]) -> list[QuestionRow]:
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
    record["format"] = REGENERATE_FORMAT
    record["data"] = None
    if data is not None:
        record["data"] = hash_source(data)
    if config.endpoint is None:
        record["target"] = identify_target(config.target, config.placement)
    return record


def begin_answering(
    config: RegenerateConfig, done: list[dict[str, Any]], stack: ExitStack
) -> Callable[[QuestionRow], dict[str, Any]]:
    """Load who answers, and return the function that makes a row's line.

    Args:
        config: the options: a server answers, or the target here.
        done: lines of a run before, whose questions the target does not write again.
        stack: ends the target's engine.
    """
    if config.endpoint:
        return partial(answer_row, config, ask_endpoint(config), None)
    spec = load_options(config)
    engine = stack.enter_context(Engine(spec, batch=config.batch, queue=config.batch))
    write: Callable[[str], str] | None = None
    if config.data is None:
        write = build_question_writer(engine, config, done)
    return partial(answer_row, config, ask_target(engine, config), write)


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


def load_rows(
    config: RegenerateConfig, data: Path | None, say: Callable[[str], None]
) -> list[QuestionRow]:
    """The rows that are asked, shuffled by the seed: the first of them are a sample of all.

    Raises InputError where there is none.
    """
    if data is None:
        assert config.from_template is not None  # one of both is there
        rows = []
        for number in range(config.from_template):
            name = f"template-{number}"
            rows.append(QuestionRow(key=name, source=name, system=None, questions=()))
    else:
        conversations, report = read_conversations(data, answered=False)
        say(f"{data}: {report}")
        rows = list_question_rows(conversations, config.turns, config.filter)
        say(f"{len(rows):,} different conversations pass --filter {config.filter}")
        if not rows:
            raise InputError(
                f"--filter {config.filter} leaves no question of {data}: take another filter"
            )
    return sorted(rows, key=lambda row: draw_number(config.seed, row.key, "order"))[: config.limit]


def answer_row(
    config: RegenerateConfig, ask: Ask, write: Callable[[str], str] | None, row: QuestionRow
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
    greedy = draw_number(config.seed, row.key, "greedy") < config.greedy * 2**63
    line: dict[str, Any] = {"id": row.source, "row": row.key}
    messages: Messages = []
    if row.system is not None:
        messages = [{"role": row.system_role, "content": row.system}]
    answers: list[RegeneratedAnswer] = []
    try:
        questions = row.questions
        if write is not None:
            questions = (write(row.key),)
        for question in questions:
            asked = messages + [{"role": "user", "content": question}]
            answer = ask(asked, draw_number(config.seed, row.key, len(answers)), greedy)
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


def describe_answers(answers: Sequence[RegeneratedAnswer]) -> dict[str, Any]:
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
