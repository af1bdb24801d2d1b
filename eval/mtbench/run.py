"""An evaluation: every question to every configuration in one process, kept answer by answer."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.eval.common import Step, in_order, seed_of
from treespec.eval.environment import describe
from treespec.eval.mtbench import answers, page
from treespec.eval.mtbench.answers import Answer
from treespec.eval.mtbench.config import (
    Configuration,
    EvalConfig,
    configurations,
    drafters_of,
    pairs_of,
)
from treespec.eval.mtbench.record import (
    dtype_of,
    models_of,
    moved,
    read_record,
    record_of,
    same_models,
)
from treespec.eval.mtbench.summary import summarise
from treespec.eval.mtbench.table import report_of
from treespec.eval.pairs import paired, refuse_unfit
from treespec.eval.questions import Question, load_questions
from treespec.eval.report import markdown
from treespec.files import locked, write_json, write_text
from treespec.sampling import SamplingParams
from treespec.spec import Output, Spec, calibration_of, load_sources
from treespec.stats import Stats
from treespec.text import templates
from treespec.trees.shape import Policy
from treespec.trees.static import TreeError
from treespec.verify.registry import verifier_by_name
from treespec.verify.walk import Verifier

WARM_UP_TOKENS = 16

Draft = tuple[Policy | None, Verifier] | None  # None: the baseline


def evaluate(
    config: EvalConfig, report: Callable[[Step], None] = lambda step: None
) -> dict[str, Any]:
    """Answer what is not answered yet, then write and return the summary (`summarise`).

    Writes OUT/config.json, OUT/answers/<model_id>.jsonl, OUT/summary.json, OUT/summary.md, OUT/trees.json and
    OUT/report.html. Pairs of tree and verifier are checked before anything is loaded. Raises InputError for
    them and other bad input, and where OUT holds another evaluation, or another process writes into it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("eval measures time in one process: launch it with --num_processes 1")
    drafts = {
        configuration: _checked(configuration, config) for configuration in configurations(config)
    }
    questions, left_out = load_questions(config.questions)
    questions = [replace(q, turns=q.turns[: config.turns]) for q in questions[: config.limit]]
    record = record_of(config, questions, left_out + pairs_of(config)[1])
    with locked(config.out):
        return _evaluated(config, drafts, questions, record, report)


def _evaluated(
    config: EvalConfig,
    drafts: dict[Configuration, Draft],
    questions: list[Question],
    record: dict[str, Any],
    report: Callable[[Step], None],
) -> dict[str, Any]:
    """`evaluate` in a folder that no other process writes into."""
    # 1. What is answered already, by the same models.
    out = Path(config.out)
    before = read_record(out / "config.json", record)
    files = {
        configuration: out / "answers" / f"{configuration.model_id}.jsonl"
        for configuration in drafts
    }
    done = {(c, answer.question_id) for c, file in files.items() for answer in answers.read(file)}
    groups = [
        questions[first : first + config.batch] for first in range(0, len(questions), config.batch)
    ]
    plan = [
        (
            [question for question in group if (configuration, question.question_id) not in done],
            configuration,
        )
        for number, group in enumerate(groups)
        for configuration in in_order(list(drafts), number)
    ]
    plan = [(group, configuration) for group, configuration in plan if group]
    total = len(questions) * len(drafts)
    there = total - sum(len(group) for group, _ in plan)
    if plan or moved(before, config):
        record["models"] = models_of(config)
        same_models(before, record["models"], config, out)

    # 2. The models, and which drafters can draft which trees.
    if plan:
        refuse_unfit([(c.drafter, *draft) for c, draft in drafts.items() if c.drafter and draft])
        report(Step(there, total, f"loading {config.target} and {config.drafter or config.head}"))
        target, sources = load_sources(
            config.target,
            drafters_of(config),
            device_map=config.device_map,
            dtype=dtype_of(config, before),
            trust_remote_code=config.trust_remote_code,
        )
        spec = Spec(target, None, template=config.template)
        calibrations = {name: calibration_of(source, name) for name, source in sources.items()}

        def fresh(configuration: Configuration) -> Spec:
            """With nothing cached: all start alike, a resumed run too, and one cache is alive at a time."""
            name, draft = configuration.drafter, drafts[configuration]
            if name is None or draft is None:
                return spec.baseline()
            tree, verifier = draft
            return Spec(
                target,
                sources[name],
                tree,
                verifier,
                config.template,
                config.allow_lossy,
                calibrations[name],
            )

        unfit = {}
        for configuration in drafts:  # trees that a drafter cannot draft
            try:
                fresh(configuration)
            except (InputError, TreeError) as error:
                unfit[configuration] = (
                    f"{configuration.drafter} with {configuration.verifier}: {error}"
                )
        if unfit and len(sources) == 1:
            raise InputError(next(iter(unfit.values())))
        record["unfit"] = [configuration.model_id for configuration in unfit]
        record["left_out"] += unfit.values()
        drafts = {
            configuration: draft
            for configuration, draft in drafts.items()
            if configuration not in unfit
        }
        plan = [(group, configuration) for group, configuration in plan if configuration in drafts]
        total -= len(questions) * len(unfit)
        spec.encode(
            [{"role": "user", "content": questions[0].turns[0]}]
        )  # refuses a missing chat template
        environment = describe(spec.target)
        if before and before["environment"] != environment:
            raise InputError(
                f"{out} was measured on {_line(before['environment'])}, this is {_line(environment)}; "
                "times of both cannot be mixed: choose another --out"
            )
        write_json(out / "config.json", record | {"environment": environment})

        # 3. Warm up, then ask.
        short = replace(config, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens))
        for configuration in drafts if config.warm_up else ():
            report(Step(there, total, f"warm-up of {configuration.model_id}"))
            for _ in range(config.warm_up):
                _ask(fresh(configuration), groups[0], configuration, short)
        before_these = there
        for group, configuration in plan:
            for answer in _ask(fresh(configuration), group, configuration, config):
                answers.append(files[configuration], answer)
                there += 1
                report(Step(there, total, answers.said(answer, explain=there == before_these + 1)))

        # 4. Trees for the page, untimed.
        report(Step(there, total, "recording a few trees for report.html"))
        page.record(out, {one: fresh(one) for one in drafts}, questions, config)
    summary = summarise(out, config.resamples)
    write_json(out / "summary.json", summary)
    write_text(out / "summary.md", markdown(report_of(summary)))
    page.write(summary, out)
    return summary


def _line(environment: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items())


def _checked(configuration: Configuration, config: EvalConfig) -> Draft:
    SamplingParams(configuration.temperature, config.top_k, config.top_p)
    if configuration.verifier is None:
        return None
    verifier = verifier_by_name(configuration.verifier, config.allow_lossy)
    return paired(verifier, configuration.tree, configuration.drafter)


def _ask(
    spec: Spec, group: list[Question], configuration: Configuration, config: EvalConfig
) -> list[Answer]:
    """All turns of some questions, answered together; each turn sees the configuration's own answers before.

    What a turn takes on the clock is divided among the questions as their stats divide it.
    """
    messages: list[list[dict[str, str]]] = [[] for _ in group]
    turns: list[list[tuple[Output, float, int]]] = [[] for _ in group]  # outputs, seconds, seeds
    for turn in range(max(len(question.turns) for question in group)):
        asked = [i for i, question in enumerate(group) if turn < len(question.turns)]
        for i in asked:
            messages[i].append({"role": "user", "content": group[i].turns[turn]})
        seeds = [
            seed_of(config.seed, group[i].question_id, turn, configuration.model_id) for i in asked
        ]
        started = time.perf_counter()
        outputs = _generate(
            spec, [messages[i] for i in asked], configuration.temperature, seeds, config
        )
        wall = time.perf_counter() - started
        counted = sum(output.stats.seconds["total"] for output in outputs)
        for i, output, seed in zip(asked, outputs, seeds, strict=True):
            share = output.stats.seconds["total"] / counted if counted else 1 / len(asked)
            turns[i].append((output, wall * share, seed))
            # fschat's templates take an empty answer for the place of the next one
            messages[i].append({"role": "assistant", "content": output.text or " "})
    return [
        _answer(question, parts, configuration, spec, config)
        for question, parts in zip(group, turns, strict=True)
    ]


def _answer(
    question: Question,
    turns: list[tuple[Output, float, int]],
    configuration: Configuration,
    spec: Spec,
    config: EvalConfig,
) -> Answer:
    outputs, wall, seeds = zip(*turns, strict=True)
    stats = [output.stats for output in outputs]
    total = Stats()
    for one in stats:
        total.add(one)
    return Answer(
        question_id=question.question_id,
        category=question.category,
        model_id=configuration.model_id,
        turns=[output.text for output in outputs],
        decoding_steps=[s.cycles for s in stats],
        new_tokens=[s.new_tokens for s in stats],
        wall_time=wall,
        accept_lengths=[accepted + 1 for accepted in total.accepted],
        extra={
            "seconds": total.seconds,
            "drafted": total.drafted,
            "accepted": total.accepted_by_depth,
            "prompt_tokens": [s.prompt_tokens for s in stats],
            "ended": [_ended_by(output, spec, config) for output in outputs],
            "seeds": seeds,
            "token_ids": [output.token_ids for output in outputs],
        },
    )


def _generate(
    spec: Spec,
    messages: list[list[dict[str, str]]],
    temperature: float,
    seeds: list[int],
    config: EvalConfig,
) -> list[Output]:
    """Answers, empty where the prompt fills the context: earlier turns may have been long."""
    prompts = [spec.encode(one) for one in messages]
    outputs = [Output("", [], Stats(prompt_tokens=len(prompt))) for prompt in prompts]
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) < spec.target.context_length]
    answered = spec.generate_all(
        [prompts[i] for i in fits],
        temperature=temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        seed=[seeds[i] for i in fits],
    )
    for i, output in zip(fits, answered, strict=True):
        outputs[i] = output
    return outputs


def _ended_by(output: Output, spec: Spec, config: EvalConfig) -> str:
    end_tokens = spec.target.eos | set(templates.stops(spec.template).token_ids)
    if output.token_ids and output.token_ids[-1] in end_tokens:
        return "model"
    if output.stats.new_tokens >= config.max_new_tokens:
        return "max_new_tokens"
    full = output.stats.prompt_tokens + output.stats.new_tokens >= spec.target.context_length
    return "context" if full else "model"
