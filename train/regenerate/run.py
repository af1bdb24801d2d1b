"""Run a regeneration: answer rows, and append each answer to a file at once, so that a killed run can continue."""

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
REGENERATE_FORMAT = 2  # version of config.json's content
# Options that change no row, only which rows are answered, how fast and where. Drafting is lossless, so a head
# may be added between runs.
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

Report = Callable[[int, int, str], None]  # (conversations done, all conversations, speed in words)


@dataclass(frozen=True)
class RegenerationResult:
    """The content of OUT at the end of a run.

    Attributes:
        path: conversations.jsonl.
        conversations: the number of its conversations.
        tokens: the number of tokens of its answers.
        left_out: the number of conversations without an answer, by reason.
    """

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

    Writes OUT/conversations.jsonl, OUT/left-out.jsonl with reasons, and OUT/config.json.

    Args:
        config: the options.
        report: called after each row with (conversations done, all conversations, speed in words).
        say: called with lines about the data.

    Raises:
        InputError: for input that cannot be used, and if OUT has rows of other options or models.
    """
    # 1. Open the files, and check that an earlier run had the same options.
    out = Path(config.out)
    data: Path | None = None
    if config.data is not None:
        data = find_data_file(config.data, say)
    record = describe_regeneration(config, data)
    with locked(out), ExitStack() as stack:
        conversations = stack.enter_context(opened(out / CONVERSATIONS_FILE))
        refusals = stack.enter_context(opened(out / LEFT_OUT_FILE))
        if conversations.done or refusals.done:
            earlier = read_json(
                out / "config.json", f"delete {out} to begin again", REGENERATE_FORMAT
            )
            refuse_changed(out, earlier, record, CHANGEABLE_OPTIONS)
        write_json(out / "config.json", record)

        # 2. The rows without an answer.
        rows = load_rows(config, data, say)
        waiting = list_waiting(rows, conversations.done + refusals.done)
        report(len(rows) - len(waiting), len(rows), "")

        # 3. Answer `config.batch` rows at a time, each in a thread; write each row when it is done.
        if waiting:
            answer = begin_answering(config, conversations.done, stack)
            pool = stack.enter_context(ThreadPool(config.batch))
            pace = Pace(rows=len(rows), waiting=len(waiting))
            for line in pool.imap_unordered(answer, waiting):
                file = refusals
                if "messages" in line:
                    file = conversations
                file.append(line)
                pace.count(line)
                report(pace.rows - pace.left, pace.rows, str(pace))

            # All are there: in their order, whatever was killed, and however many were answered at a time.
            places = {row.key: place for place, row in enumerate(rows)}
            for lines in (conversations, refusals):
                lines.sort(lambda line: places.get(line["row"], len(rows)))

        # 4. Count.
        reasons = Counter(str(line["problem"]) for line in refusals.done)
        total = sum(sum(line["tokens"]) for line in conversations.done)
        return RegenerationResult(out / CONVERSATIONS_FILE, len(conversations.done), total, reasons)


def list_waiting(rows: list[QuestionRow], done_lines: list[dict[str, Any]]) -> list[QuestionRow]:
    """List the rows that have no line in OUT yet. done_lines: the lines of OUT."""
    ended_rows = {line["row"] for line in done_lines}
    return [row for row in rows if row.key not in ended_rows]


def describe_regeneration(config: RegenerateConfig, data: Path | None) -> Record:
    """Build the content of OUT/config.json: the options, with digests of data and target.

    data: the file of the conversations; None if the target writes the questions.
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
    config: RegenerateConfig, done_lines: list[dict[str, Any]], stack: ExitStack
) -> Callable[[QuestionRow], dict[str, Any]]:
    """Load the target unless a server answers, and return the function (row) -> its line of OUT.

    Args:
        config: the options.
        done_lines: lines of earlier runs; the target does not write their questions again.
        stack: closes the target's engine.
    """
    if config.endpoint:
        return partial(answer_row, config, ask_endpoint(config), None)
    spec = load_options(config)
    engine = stack.enter_context(Engine(spec, batch=config.batch, queue=config.batch))
    write: Callable[[str], str] | None = None
    if config.data is None:
        write = build_question_writer(engine, config, done_lines)
    return partial(answer_row, config, ask_target(engine, config), write)


class Pace:
    """Measures the speed of a regeneration.

    Args:
        rows: the number of all rows.
        waiting: the number of rows without an answer at the start.
    """

    def __init__(self, rows: int, waiting: int) -> None:
        self.rows = rows
        self.left = waiting
        self.answered = 0
        self.tokens = 0
        self.started = time.perf_counter()

    def count(self, line: dict[str, Any]) -> None:
        """Count a row that is done, by its line."""
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
    """Load the rows to ask, shuffled by the seed, so that the first rows are a sample of all.

    Raises InputError if there is no row.
    """
    if data is None:
        assert config.from_template is not None  # the config demands one of the two
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
    """Ask a row's questions one after the other, and return its line of OUT.

    If a question has no answer, the row ends before it, and the line's `problem` says why. The line has no
    messages if this is the first question.

    Args:
        config: the run's options.
        ask: (messages, seed, greedy) -> answer.
        write: (key) -> the question of a row; None if the row has its questions.
        row: the row.
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
            prompt_messages = messages + [{"role": "user", "content": question}]
            answer = ask(prompt_messages, draw_number(config.seed, row.key, len(answers)), greedy)
            if not answer.text.strip():  # readers of the file refuse it
                raise LeftOut("an answer is empty")
            answers.append(answer)
            messages = prompt_messages + [answer.message]
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
    """Build the fields of a line with one value for each answer. Token ids are there if all answers have them."""
    fields: dict[str, Any] = {
        "tokens": [answer.tokens for answer in answers],
        "ended": [answer.ended for answer in answers],
    }
    if all(answer.token_ids for answer in answers):
        fields["input_ids"] = []
        fields["loss_mask"] = []
        for answer in answers:
            prompt_ids = list(answer.prompt_ids)
            answer_ids = list(answer.token_ids)
            fields["input_ids"].append(prompt_ids + answer_ids)
            fields["loss_mask"].append([0] * len(prompt_ids) + [1] * len(answer_ids))
    return fields
