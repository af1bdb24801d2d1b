"""An evaluation: every question to every configuration in one process, kept answer by answer."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

from treespec.errors import InputError
from treespec.eval.common import Step, in_order
from treespec.eval.environment import describe
from treespec.eval.mtbench import answers, page
from treespec.eval.mtbench.ask import ask, recall, said
from treespec.eval.mtbench.config import (
    Configuration,
    EvalConfig,
    categories_of,
    check_kept,
    configurations,
    drafters_of,
    pairs_of,
)
from treespec.eval.mtbench.judge import judge
from treespec.eval.mtbench.models import Draft, load_models, unfit
from treespec.eval.mtbench.record import (
    Record,
    dtype_of,
    models_of,
    moved,
    read_record,
    record_of,
    same_models,
)
from treespec.eval.mtbench.result import Summary
from treespec.eval.mtbench.summary import summarise
from treespec.eval.mtbench.table import report_of
from treespec.eval.pairs import Pair, paired, refuse_unfit
from treespec.eval.questions import Question, first_of_each, load_checked
from treespec.eval.report import markdown
from treespec.eval.suites.checks import Check
from treespec.eval.verdict import FEW
from treespec.files.atomic import locked, write_json, write_text
from treespec.shaping.sampling import SamplingParams

WARM_UP_TOKENS = 16

Plan = list[tuple[list[Question], Configuration]]  # questions asked together, and whom


def evaluate(config: EvalConfig, report: Callable[[Step], None] = lambda step: None) -> Summary:
    """Answer what is not answered yet, then write and return the summary (`summarise`).

    Writes OUT/config.json, OUT/answers/<model_id>.jsonl, OUT/summary.json, OUT/summary.md,
    OUT/trees.json and OUT/report.html, and OUT/right.json where answers can be right or wrong.
    Raises InputError for bad input, for a tree and a verifier that do not fit, and where OUT holds
    another evaluation or another process writes into it; most of that before anything is loaded.
    """
    # 1. What can be refused without the models.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("eval measures time in one process: launch it with --num_processes 1")
    drafts = {
        configuration: _checked(configuration, config) for configuration in configurations(config)
    }

    # 2. The questions.
    questions, checks, left_out = load_checked(config.questions, categories_of(config))
    some = first_of_each(config.questions, questions, config.per_category)[: config.limit]
    questions = [replace(q, turns=q.turns[: config.turns]) for q in some]
    record = record_of(config, questions, left_out + pairs_of(config)[1])
    with locked(config.out):
        return _evaluated(config, drafts, questions, checks, record, report)


def _evaluated(
    config: EvalConfig,
    drafts: dict[Configuration, Draft],
    questions: list[Question],
    checks: Mapping[int | str, Check],
    record: Record,
    report: Callable[[Step], None],
) -> Summary:
    """`evaluate` in a folder that no other process writes into."""
    # 1. What is answered already, by the same models. Few questions need no noise of the clock.
    if len(questions) < FEW:
        drafts = {one: draft for one, draft in drafts.items() if not one.again}
    out = Path(config.out)
    before = read_record(out / "config.json", record)
    files = {
        configuration: out / "answers" / f"{configuration.model_id}.jsonl"
        for configuration in drafts
    }
    plan = _plan(questions, files, config.batch)
    if plan or moved(before, config):
        record["models"] = models_of(config)
        same_models(before, record["models"], config, out)

    # 2. The rest of the answers.
    if plan:
        named = [Pair(c.drafter, c.verifier, c.tree) for c in drafts if c.drafter and c.verifier]
        refuse_unfit(named, config.allow_lossy)
        _answer_all(config, drafts, questions, files, plan, record, before, report)

    # 3. What they come to.
    judge(out, files.values(), checks, config.run_code, report)
    summary = summarise(out, config.resamples)
    write_json(out / "summary.json", summary)
    write_text(out / "summary.md", markdown(report_of(summary)))
    page.write(summary, out)
    return summary


def _plan(questions: list[Question], files: Mapping[Configuration, Path], batch: int) -> Plan:
    """The questions that each configuration has not answered yet, in the order to ask them.

    batch: questions asked together. Configurations take turns, so that none of them has the machine
    at a better time.
    """
    # 1. The answers that are there.
    done = {(c, answer.question_id) for c, file in files.items() for answer in answers.read(file)}
    groups = [questions[first : first + batch] for first in range(0, len(questions), batch)]
    again = asked_again(len(groups))

    # 2. Group by group, every configuration in turn.
    plan: Plan = []
    for number, group in enumerate(groups):
        for configuration in in_order(list(files), number):
            if configuration.again and number not in again:
                continue
            left = [q for q in group if (configuration, q.question_id) not in done]
            if left:
                plan.append((left, configuration))
    return plan


def asked_again(groups: int) -> set[int]:
    """The groups of questions that the baseline is asked a second time: a quarter, at least FEW.

    They are drawn at random: evenly spaced ones could all have the same order of configurations.
    """
    return set(Random(0).sample(range(groups), min(groups, max(FEW, groups // 4))))


def _answer_all(
    config: EvalConfig,
    drafts: dict[Configuration, Draft],
    questions: list[Question],
    files: Mapping[Configuration, Path],
    plan: Plan,
    record: Record,
    before: Record | None,
    report: Callable[[Step], None],
) -> None:
    """Load the models and answer what is planned, keeping each answer as it comes.

    Adds to the record what the models say: which trees no drafter can draft, and the environment.
    Raises InputError where the only drafter does not fit, and on another machine than before.
    """
    # 1. The models.
    check_kept(config)
    out, there = Path(config.out), sum(len(answers.read(file)) for file in files.values())
    total = there + sum(len(group) for group, _ in plan)
    report(Step(there, total, f"loading {config.target} and {config.drafter or config.head}"))
    plain, fresh = load_models(config, dtype_of(config, before))

    # 2. Leave out trees that a drafter cannot draft.
    reasons = unfit(fresh, drafts.items())
    if reasons and len(set(drafters_of(config))) == 1:
        raise InputError(next(iter(reasons.values())))
    record["unfit"] = [configuration.model_id for configuration in reasons]
    record["left_out"] += reasons.values()
    fit = [configuration for configuration in drafts if configuration not in reasons]
    plan = [(group, configuration) for group, configuration in plan if configuration in fit]
    total = there + sum(len(group) for group, _ in plan)

    # 3. Refuse a target without chat template, and another machine.
    plain.encode([{"role": "user", "content": questions[0].turns[0]}])
    environment = describe(plain.target)
    if before and before["environment"] != environment:
        raise InputError(
            f"{out} was measured on {_line(before['environment'])}, this is {_line(environment)}; "
            "times of both cannot be mixed: choose another --out"
        )
    record["environment"] = environment
    write_json(out / "config.json", record)

    # 4. Warm up.
    short = replace(
        config, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens), memory="none"
    )
    for configuration in fit if config.warm_up else ():
        report(Step(there, total, f"warm-up of {configuration.model_id}"))
        for _ in range(config.warm_up):
            spec = fresh(configuration, drafts[configuration])
            ask(spec, questions[: config.batch], configuration, short)

    # 5. Ask.
    for configuration in fit:
        spec = fresh(configuration, drafts[configuration])
        recall(spec, questions, answers.read(files[configuration]), configuration, config)
    at_start = there
    for group, configuration in plan:
        spec = fresh(configuration, drafts[configuration])
        for answer in ask(spec, group, configuration, config):
            answers.append(files[configuration], answer)
            there += 1
            report(Step(there, total, said(answer, explain=there == at_start + 1)))

    # 6. Trees for the page, untimed.
    report(Step(there, total, "recording a few trees for report.html"))
    page.record(out, {c: fresh(c, drafts[c]) for c in fit}, questions, config)


def _line(environment: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def _checked(configuration: Configuration, config: EvalConfig) -> Draft:
    """The tree and verifier of a configuration. Raises InputError where they do not fit."""
    SamplingParams(configuration.temperature, config.top_k, config.top_p)
    if configuration.verifier is None:
        return None
    names = configuration.verifier, configuration.tree, configuration.drafter
    return paired(*names, config.allow_lossy)
