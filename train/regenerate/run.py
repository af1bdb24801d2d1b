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
    *("out", "limit", "from_template", "batch", "head", "drafter", "tree", "verifier"),
    *("device_map", "allow_lossy", "trust_remote_code", "endpoint"),
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
        left_out = f"; {self.left_out.total()} left out ({reasons})" if reasons else ""
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
    data = None if config.data is None else data_file(config.data, say)
    record: Record = {"answers_by": "a server" if config.endpoint else "the target"}
    record |= asdict(config) | {"format": FORMAT, "data": data and digest(data)}
    if config.endpoint is None:
        record["target"] = target_identity(config.target, config.placement)
    with locked(out), ExitStack() as stack:
        kept, left_out = (stack.enter_context(opened(out / name)) for name in (OUT, LEFT_OUT))
        if kept.done or left_out.done:
            before = read_json(out / "config.json", f"delete {out} to begin again", FORMAT)
            refuse_changed(out, before, record, FREE)
        write_json(out / "config.json", record)

        # 2. The rows that are left, and who asks and answers them.
        rows = rows_in(config, data, say)
        ended = {line["row"] for line in (*kept.done, *left_out.done)}
        waiting = [row for row in rows if row.key not in ended]
        report(len(rows) - len(waiting), len(rows), "")
        if waiting and config.endpoint:
            work = partial(answered, config, of_server(config), None)
        elif waiting:
            room = {"batch": config.batch, "queue": config.batch}
            engine = stack.enter_context(Engine(load_options(config), **room))
            write = writer(engine, config, kept.done) if data is None else None
            work = partial(answered, config, of_target(engine, config), write)

        # 3. A thread for each row that is answered at a time; each is kept as it ends.
        tokens = 0
        started = time.perf_counter()
        pool = stack.enter_context(ThreadPool(config.batch))
        for done, line in enumerate(pool.imap_unordered(work, waiting) if waiting else (), 1):
            (kept if "messages" in line else left_out).append(line)
            tokens += sum(line.get("tokens", ()))
            seconds = time.perf_counter() - started
            left = len(waiting) - done
            rest = timedelta(seconds=round(seconds / done * left))
            report(len(rows) - left, len(rows), f", {tokens / seconds:,.1f} tokens/s, {rest} left")

        # 4. What is there now.
        reasons = Counter(str(line["problem"]) for line in left_out.done)
        total = sum(sum(line["tokens"]) for line in kept.done)
        return Result(out / OUT, len(kept.done), total, reasons)


def rows_in(config: RegenerateConfig, data: Path | None, say: Callable[[str], None]) -> list[Row]:
    """The rows that are asked, shuffled by the seed: the first of them are a sample of all.

    Raises InputError where there is none.
    """
    if data is None:
        names = (f"template-{number}" for number in range(config.from_template or 0))
        rows = [Row(name, name, None, ()) for name in names]
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
    """The line of a row: its questions, asked one after the other, with their answers as text and as tokens.

    write: (key) -> the question of a row. The line has no messages where the first question has no
    answer. A problem says why there is none, or no further one.
    """
    greedy = drawn(config.seed, row.key, "greedy") < config.greedy * 2**63
    line: dict[str, Any] = {"id": row.source, "row": row.key}
    messages: Messages = []
    if row.system is not None:
        messages = [{"role": row.system_role, "content": row.system}]
    answers: list[Answer] = []
    try:
        for question in row.questions if write is None else [write(row.key)]:
            asked = [*messages, {"role": "user", "content": question}]
            answer = ask(asked, drawn(config.seed, row.key, len(answers)), greedy)
            if not answer.text.strip():  # no reader of the file takes it
                raise LeftOut("an answer is empty")
            answers.append(answer)
            messages = [*asked, answer.message]
    except LeftOut as problem:
        line["problem"] = str(problem)
    if answers:
        line["messages"] = messages
        line["temperature"] = 0.0 if greedy else config.temperature
        line |= describe_answers(answers)
    return line


def describe_answers(answers: Sequence[Answer]) -> dict[str, Any]:
    """The fields of a line with a value an answer. Token ids are there where all are known."""
    fields: dict[str, Any] = {
        "tokens": [answer.tokens for answer in answers],
        "ended": [answer.ended for answer in answers],
    }
    if all(answer.token_ids for answer in answers):
        fields["input_ids"] = [[*answer.prompt_ids, *answer.token_ids] for answer in answers]
        fields["loss_mask"] = [
            [0] * len(answer.prompt_ids) + [1] * len(answer.token_ids) for answer in answers
        ]
    return fields
