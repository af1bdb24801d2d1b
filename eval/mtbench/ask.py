"""Ask a configuration some questions, and keep of its answers what the summary needs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treespec.api.spec import Output, Spec
from treespec.decoding.sequence import LEAD
from treespec.decoding.stats import Stats, figures
from treespec.eval.common import seed_of
from treespec.eval.mtbench.answers import Answer
from treespec.eval.mtbench.config import Configuration, EvalConfig
from treespec.eval.questions import Question
from treespec.requests.request import Seed
from treespec.text import templates


@dataclass(frozen=True)
class Turn:
    """One answered turn. seconds: its share of the clock. seed: of its random draws."""

    output: Output
    seconds: float
    seed: int


def ask(
    spec: Spec, group: list[Question], configuration: Configuration, config: EvalConfig
) -> list[Answer]:
    """Answers to all turns of some questions, which are answered together.

    Each turn follows the configuration's own answers to the turns before it.
    """
    messages: list[list[dict[str, str]]] = [[] for _ in group]
    answered: list[list[Turn]] = [[] for _ in group]
    for number in range(max(len(question.turns) for question in group)):
        # 1. The conversations that have this turn.
        asked = [i for i, question in enumerate(group) if number < len(question.turns)]
        for i in asked:
            messages[i].append({"role": "user", "content": group[i].turns[number]})
        seeds = [
            seed_of(config.seed, group[i].question_id, number, configuration.model_id)
            for i in asked
        ]

        # 2. Their answers, on the clock.
        started = time.perf_counter()
        outputs = _generate(spec, [messages[i] for i in asked], configuration, seeds, config)
        wall = time.perf_counter() - started

        # 3. Divide the time among the conversations in proportion to their own seconds.
        counted = sum(output.stats.seconds["total"] for output in outputs)
        for i, output, seed in zip(asked, outputs, seeds, strict=True):
            share = output.stats.seconds["total"] / counted if counted else 1 / len(asked)
            answered[i].append(Turn(output, wall * share, seed))
            # fschat's templates take an empty answer for the place of the next one
            messages[i].append({"role": "assistant", "content": output.text or " "})
    return [
        _answer(question, turns, configuration, spec, config)
        for question, turns in zip(group, answered, strict=True)
    ]


def _generate(
    spec: Spec,
    messages: list[list[dict[str, str]]],
    configuration: Configuration,
    seeds: list[int],
    config: EvalConfig,
) -> list[Output]:
    """The answers to some conversations, empty where a prompt fills the context."""
    # 1. Prompts; earlier turns may have been long.
    prompts = [spec.encode(conversation) for conversation in messages]
    outputs = [Output("", [], Stats(prompt_tokens=len(prompt))) for prompt in prompts]
    fits = [i for i, prompt in enumerate(prompts) if len(prompt) < spec.target.context_length]

    # 2. Answers to those that fit.
    generated = spec.generate_all(
        [prompts[i] for i in fits],
        temperature=configuration.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        seed=[_drawn_from(seeds[i], config) for i in fits],
        memory=memory_of(configuration, config),
        remember=config.memory == "run",
    )
    for i, output in zip(fits, generated, strict=True):
        outputs[i] = output
    return outputs


def _drawn_from(seed: int, config: EvalConfig) -> Seed:
    """With a memory a generator: an answer whose seed is a number is drafted from none."""
    return seed if config.memory == "none" else torch.Generator().manual_seed(seed)


def memory_of(configuration: Configuration, config: EvalConfig) -> str | None:
    """The name of the answers that a drafter with a memory may draft from.

    By default from none but the question's own turns, which are in its prompt: then no answer
    depends on the order of the questions, on a resumption, or on what others answered.
    """
    return {"none": None, "run": f"eval {configuration.model_id}", "kept": ""}[config.memory]


def recall(
    spec: Spec,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    configuration: Configuration,
    config: EvalConfig,
) -> None:
    """Remember the answers of an earlier run, as that run did, before this one goes on."""
    memory, drafter = memory_of(configuration, config), spec.decoder.drafter
    if config.memory != "run" or memory is None or drafter is None:
        return
    turns = {question.question_id: question.turns for question in questions}
    for answer in answers:
        messages: list[dict[str, str]] = []
        told = zip(turns[answer.question_id], answer.turns, answer.extra["token_ids"], strict=True)
        for asked, text, tokens in told:
            messages.append({"role": "user", "content": asked})
            if tokens:  # none where the prompt filled the context
                drafter.remember(memory, [*spec.encode(messages)[-LEAD:], *tokens])
            messages.append({"role": "assistant", "content": text or " "})


def _answer(
    question: Question,
    turns: list[Turn],
    configuration: Configuration,
    spec: Spec,
    config: EvalConfig,
) -> Answer:
    """The answer line of one question."""
    # 1. Counts of all turns together.
    stats = [turn.output.stats for turn in turns]
    total = Stats()
    for of_turn in stats:
        total.add(of_turn)

    # 2. The line.
    return Answer(
        question_id=question.question_id,
        category=question.category,
        model_id=configuration.model_id,
        turns=[turn.output.text for turn in turns],
        decoding_steps=[of_turn.cycles for of_turn in stats],
        new_tokens=[of_turn.new_tokens for of_turn in stats],
        wall_time=[turn.seconds for turn in turns],
        accept_lengths=[accepted + 1 for accepted in total.accepted],
        extra={
            "seconds": total.seconds,
            "drafted": total.drafted,
            "accepted": total.accepted_by_depth,
            "undrafted": total.undrafted,
            "prompt_tokens": [of_turn.prompt_tokens for of_turn in stats],
            "ended": [_ended_by(turn.output, spec, config) for turn in turns],
            "seeds": [turn.seed for turn in turns],
            "token_ids": [turn.output.token_ids for turn in turns],
        },
    )


def _ended_by(output: Output, spec: Spec, config: EvalConfig) -> str:
    """What ended an answer: "model", "max_new_tokens" or "context"."""
    end_tokens = spec.target.eos | set(templates.stops(spec.template).token_ids)
    if output.token_ids and output.token_ids[-1] in end_tokens:
        return "model"
    if output.stats.new_tokens >= config.max_new_tokens:
        return "max_new_tokens"
    full = output.stats.prompt_tokens + output.stats.new_tokens >= spec.target.context_length
    return "context" if full else "model"


def said(answer: Answer, explain: bool) -> str:
    """The line of progress of an answer. explain: with the meaning of τ."""
    tokens, cycles = sum(answer.new_tokens), sum(answer.decoding_steps)
    spent = figures(tokens, cycles, sum(answer.wall_time), explain)
    return f"question {answer.question_id}, {answer.model_id}: {spent}"
