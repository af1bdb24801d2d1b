"""Ask every row of a benchmark every question, in turns, and state what each row achieved."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

from treespec.api.spec import Spec
from treespec.decoding.stats import Stats
from treespec.errors import InputError
from treespec.eval.bench.config import BenchConfig
from treespec.eval.bench.figures import Timed, cycle_figures, identical, speed_figures
from treespec.eval.bench.peers import GENERATE
from treespec.eval.bench.result import RowFigures
from treespec.eval.bench.rows import ONE_TOKEN, Row
from treespec.eval.common import in_order, seed_of
from treespec.eval.questions import Question

WARM_UP_TOKENS = 16


def asked(spec: Spec, questions: list[Question]) -> tuple[list[Question], list[str]]:
    """(questions whose first turn leaves room for an answer, the problem of each of the others).

    Raises InputError if no question does.
    """
    context_length = spec.target.context_length
    fits, problems = [], []
    for question in questions:
        length = len(spec.encode([{"role": "user", "content": question.turns[0]}]))
        if length < context_length:
            fits.append(question)
        else:
            name = f"question {question.question_id}"
            problems.append(f"{name}: its {length} tokens fill the target's context")
    if not fits:
        raise InputError(f"--questions: none fits the target's context of {context_length} tokens")
    return fits, problems


def measure_rows(
    spec: Spec,
    rows: list[Row],
    questions: list[Question],
    config: BenchConfig,
    say: Callable[[str], None],
) -> list[RowFigures]:
    """Ask every row every question; the order of the rows differs by question (`in_order`)."""
    answers: dict[Row, list[Timed]] = defaultdict(list)
    failed: dict[Row, str] = {}

    def ask(row: Row, question: Question, config: BenchConfig) -> Timed | None:
        try:
            return None if row in failed else answer(row, spec, question, config)
        except Exception as error:  # a peer may raise any class of error; its row then shows it
            if not row.peer:
                raise
            first_line = (str(error).strip().splitlines() or [""])[0]
            failed[row] = f"{type(error).__name__}: {first_line}"
            return None

    # 1. Two short answers of each row warm it up.
    short = replace(config, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens))
    for row in [*rows, *rows]:
        ask(row, questions[0], short)

    # 2. The timed answers.
    for number, question in enumerate(questions):
        for row in in_order(rows, number):
            if timed := ask(row, question, config):
                answers[row].append(timed)
            say(f"question {question.question_id}, {row.name} at temperature {row.temperature:g}")

    # 3. Figures.
    return [row_figures(row, rows, answers, failed, config.seed) for row in rows]


def answer(row: Row, spec: Spec, question: Question, config: BenchConfig) -> Timed:
    """All turns of a question as one answer; each prompt holds the row's own earlier answers."""
    # 1. The turns, as far as the context has room.
    messages: list[dict[str, str]] = []
    turns: list[Timed] = []
    for turn, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        prompt = spec.encode(messages)
        room = spec.target.context_length - len(prompt)
        if room < 1:
            break
        seed = seed_of(config.seed, question.question_id, turn, f"{row.name}-t{row.temperature:g}")
        turns.append(row.answer(prompt, min(config.max_new_tokens, room), seed))
        said = spec.target.tokenizer.decode(turns[-1].tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said or " "})

    # 2. Their sum.
    tokens = [token for timed in turns for token in timed.tokens]
    seconds = sum(timed.seconds for timed in turns)
    return Timed(tokens, seconds, total(t.stats for t in turns), total(t.stages for t in turns))


def total(parts: Iterable[Stats | None]) -> Stats | None:
    """The sum of all parts; None if one of them is None."""
    result = Stats()
    for stats in parts:
        if stats is None:
            return None
        result.add(stats)
    return result


def row_figures(
    row: Row,
    rows: list[Row],
    answers: dict[Row, list[Timed]],
    failed: dict[Row, str],
    seed: int,
) -> RowFigures:
    """The figures of one row beside one-token decoding and `model.generate`.

    failed: the errors of rows that raised.
    """
    # 1. A row that raised has none.
    result: RowFigures = {
        "name": row.name,
        "temperature": row.temperature,
        "peer": row.peer,
        "failed": failed.get(row),
        "same_as_one_token": None,
        "speed": None,
        "cycle": None,
        "undrafted": 0.0,
        "answers": [],
    }
    if row in failed:
        return result

    # 2. The rest compare question by question.
    beside = [r for r in rows if r.temperature == row.temperature and r not in failed]
    by_name = {r.name: answers[r] for r in beside}
    ours, one_token = answers[row], by_name[ONE_TOKEN]
    if row.temperature == 0:
        result["same_as_one_token"] = identical(ours, one_token)
    result["speed"] = speed_figures(ours, by_name.get(GENERATE), one_token, seed)
    if not row.peer:
        result["cycle"] = cycle_figures(ours, one_token, seed)
        whole = total(answer.stats for answer in ours)
        result["undrafted"] = whole.undrafted / whole.cycles if whole else 0.0
    result["answers"] = [{"tokens": len(a.tokens), "seconds": a.seconds} for a in ours]
    return result
