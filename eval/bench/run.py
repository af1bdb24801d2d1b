"""The benchmark: forwards, cycles and peers in one run, everything taking turns, for each number of padded layers."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.eval.bench.batches import ROUNDS, batches, cases
from treespec.eval.bench.config import BenchConfig, contexts, whole_numbers
from treespec.eval.bench.figures import Timed, of_cycles, of_speed, same
from treespec.eval.bench.forwards import WARM_UP, forwards
from treespec.eval.bench.padding import pad
from treespec.eval.bench.peers import GENERATE, fit_assistant, load_assistant, peer_rows
from treespec.eval.bench.plot import plot
from treespec.eval.bench.rows import ONE_TOKEN, Row, drafts, label, own_rows, temperatures
from treespec.eval.bench.table import report_of
from treespec.eval.common import Step, in_order, seed_of
from treespec.eval.environment import describe
from treespec.eval.pairs import refuse_unfit
from treespec.eval.questions import Question, load_questions
from treespec.eval.report import markdown
from treespec.files import locked, write_json, write_text
from treespec.spec import Spec, load
from treespec.stats import Stats
from treespec.target import Target

WARM_UP_TOKENS = 16


def bench(
    config: BenchConfig, report: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """Measures, and after each number of padded layers writes what there is. Raises InputError for bad input.

    Writes and returns OUT/bench.json: {config, environment, questions, left_out, plots, paddings: [{added, layers,
    logit_difference, forwards, rows, batches}]}. forwards, batches: as by the functions of that name. A row is {name,
    label, temperature, peer, failed, same_as_one_token, speed, cycle, answers}; speed: `of_speed`; cycle: `of_cycles`,
    None for peers; failed: why a peer raised, who then has no figures. Also writes OUT/bench.md and plots.
    """
    found = drafts(config)  # these raise before anything is loaded
    refuse_unfit([(config.drafter or f"head:{config.head}", *draft) for draft in found.values()])
    cases(config, found, temperatures(config))
    whole_numbers("pad-layers", config.pad_layers, 0)
    contexts(config, 1 << 40)
    questions, left_out = load_questions(config.questions)
    with locked(config.out):
        return measured_in(Path(config.out), config, questions, left_out, report)


def measured_in(
    out: Path,
    config: BenchConfig,
    questions: list[Question],
    left_out: list[str],
    report: Callable[[Step], None],
) -> dict[str, Any]:
    """`bench` in a folder that no other process writes into."""
    found, heats = drafts(config), temperatures(config)
    paddings = whole_numbers("pad-layers", config.pad_layers, 0)
    chosen = cases(config, found, heats)
    report(Step(0, 1, f"loading {config.target} and {config.drafter or config.head}"))
    loaded = (
        load_assistant(config.assistant, config.dtype, config.trust_remote_code)
        if config.assistant
        else None
    )
    spec = load(
        config.target,
        config.head,
        drafter=config.drafter,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    target = spec.target
    theirs = target
    if config.stock_peers:
        theirs = Target.load(
            config.target,
            device_map=config.device_map,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
    assistant = fit_assistant(*loaded, target, packed=not config.stock_peers) if loaded else None
    lengths = contexts(config, target.context_length)
    questions, too_long = asked(
        spec, [replace(q, turns=q.turns[: config.turns]) for q in questions[: config.limit]]
    )

    peers = peer_rows(theirs, assistant, 0.0)
    steps = (
        WARM_UP
        + config.rounds
        + len(questions) * len(heats) * (1 + len(found) + len(peers))
        + ROUNDS * len(chosen)
    )
    done, total = 0, steps * len(paddings)

    def say(text: str) -> None:
        nonlocal done
        done += 1
        report(Step(done, total, text))

    result: dict[str, Any] = {
        "config": asdict(config),
        "environment": describe(target),
        "questions": len(questions),
        "left_out": left_out + too_long,
        "plots": None,
        "paddings": [],
    }
    added, difference = 0, 0.0
    for layers in paddings:
        difference += pad(target, layers - added)
        if theirs is not target:
            pad(theirs, layers - added)
        added = layers
        timed = forwards(spec, lengths, config.rounds, config.seed, say)
        rows = [
            row
            for heat in heats
            for row in (*own_rows(spec, found, heat), *peer_rows(theirs, assistant, heat))
        ]
        measured = {
            "added": added,
            "layers": target.layers,
            "logit_difference": difference,
            "forwards": timed,
            "rows": _measured(spec, rows, questions, config, added, say),
            "batches": batches(spec, found, chosen, questions, config, added, say),
        }
        result["paddings"].append(measured)
        result["plots"] = plot(result, out)
        write_json(out / "bench.json", result)
        write_text(out / "bench.md", markdown(report_of(result)))
    return result


def asked(spec: Spec, questions: list[Question]) -> tuple[list[Question], list[str]]:
    """(questions whose first turn leaves room for an answer, what is wrong with the others). Raises InputError."""
    fits, problems = [], []
    for question in questions:
        length = len(spec.encode([{"role": "user", "content": question.turns[0]}]))
        if length < spec.target.context_length:
            fits.append(question)
        else:
            problems.append(
                f"question {question.question_id}: its {length} tokens fill the target's context"
            )
    if not fits:
        raise InputError(
            f"--questions: none fits the target's context of {spec.target.context_length} tokens"
        )
    return fits, problems


def _measured(
    spec: Spec,
    rows: list[Row],
    questions: list[Question],
    config: BenchConfig,
    added: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Every question to every row, the rows in an order of its own for each, after a warm-up."""
    answers: dict[Row, list[Timed]] = defaultdict(list)
    failed: dict[Row, str] = {}

    def ask(row: Row, question: Question, settings: BenchConfig) -> Timed | None:
        try:
            return None if row in failed else _ask(row, spec, question, settings)
        except Exception as error:  # a peer may raise what it likes; its row then says why
            if not row.peer:
                raise
            failed[row] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            return None

    short = replace(config, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens))
    for row in [*rows, *rows]:
        ask(row, questions[0], short)
    for number, question in enumerate(questions):
        for row in in_order(rows, number):
            if answer := ask(row, question, config):
                answers[row].append(answer)
            say(
                f"question {question.question_id}, {label(row.name, added)} at temperature {row.temperature:g}"
            )
    return [
        {
            "name": row.name,
            "label": label(row.name, added),
            "temperature": row.temperature,
            "peer": row.peer,
        }
        | _figures(row, rows, answers, failed, config.seed)
        for row in rows
    ]


def _ask(row: Row, spec: Spec, question: Question, config: BenchConfig) -> Timed:
    """All turns of a question; each turn sees the row's own answers to those before."""
    messages: list[dict[str, str]] = []
    parts = []
    for turn, text in enumerate(question.turns):
        messages.append({"role": "user", "content": text})
        prompt = spec.encode(messages)
        room = spec.target.context_length - len(prompt)
        if room < 1:
            break
        seed = seed_of(config.seed, question.question_id, turn, f"{row.name}-t{row.temperature:g}")
        parts.append(row.answer(prompt, min(config.max_new_tokens, room), seed))
        said = spec.target.tokenizer.decode(parts[-1].tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": said or " "})
    tokens = [token for part in parts for token in part.tokens]
    return Timed(
        tokens,
        sum(p.seconds for p in parts),
        _sum([p.stats for p in parts]),
        _sum([p.stages for p in parts]),
    )


def _sum(stats: list[Stats | None]) -> Stats | None:
    total = Stats()
    for one in stats:
        if one is None:
            return None
        total.add(one)
    return total


def _figures(
    row: Row, rows: list[Row], answers: dict[Row, list[Timed]], failed: dict[Row, str], seed: int
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "failed": failed.get(row),
        "same_as_one_token": None,
        "speed": None,
        "cycle": None,
    }
    found["answers"] = []
    if row in failed:
        return found
    beside = {
        r.name: answers[r] for r in rows if r.temperature == row.temperature and r not in failed
    }
    mine, plain = answers[row], beside[ONE_TOKEN]
    if row.temperature == 0:
        found["same_as_one_token"] = same(mine, plain)
    found["speed"] = of_speed(mine, beside.get(GENERATE), plain, seed)
    found["cycle"] = None if row.peer else of_cycles(mine, plain, seed)
    return found | {"answers": [{"tokens": len(a.tokens), "seconds": a.seconds} for a in mine]}
