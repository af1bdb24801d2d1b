"""Ask a contestant some questions, turn by turn, and keep what the report needs of it."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from treespec.api.spec import Output, Spec
from treespec.decoding.stats import Stats, figures
from treespec.eval.common import seed_of
from treespec.eval.config import EvalConfig
from treespec.eval.contestants import Contestant
from treespec.eval.ledger import Completion
from treespec.eval.questions import Question


class Ask(NamedTuple):
    """A prompt, as messages and as the target's tokens, and how to complete it.

    seed: of its draws. most: new tokens, which the target's context has room for.
    """

    messages: list[dict[str, str]]
    ids: list[int]
    seed: int
    most: int


Answerer = Callable[[Sequence[Ask]], list[Output]]  # several prompts are answered together


def ask(
    answer: Answerer, group: list[Question], one: Contestant, spec: Spec, config: EvalConfig
) -> list[Completion]:
    """A contestant's completions of all turns of some questions, which it answers together.

    Each turn follows its own completions of the turns before. spec: encodes the prompts.
    """
    messages: list[list[dict[str, str]]] = [[] for _ in group]
    turns: list[list[tuple[Output, float, int]]] = [[] for _ in group]  # completion, seconds, seed
    room = spec.target.context_length
    for number in range(max(len(question.turns) for question in group)):
        # 1. The conversations that have this turn; a prompt may fill the context.
        outputs: dict[int, Output] = {}
        asks: dict[int, Ask] = {}
        for i, question in enumerate(group):
            if number < len(question.turns):
                messages[i].append({"role": "user", "content": question.turns[number]})
                prompt, name = spec.encode(messages[i]), one.name.removesuffix(f"-b{one.batch}")
                seed = seed_of(config.seed, question.question_id, number, name)
                most = min(config.max_new_tokens, room - len(prompt))
                asks[i] = Ask(messages[i], prompt, seed, most)
                outputs[i] = Output("", [], Stats(prompt_tokens=len(prompt), truncated=True))

        # 2. Their completions, on the clock.
        fits = {i: asks[i] for i in asks if asks[i].most > 0}
        started = time.perf_counter()
        if fits:
            outputs |= zip(fits, answer(list(fits.values())), strict=True)
        wall = time.perf_counter() - started

        # 3. Divide the time among the conversations in proportion to their own seconds.
        counted = sum(output.stats.seconds["total"] for output in outputs.values())
        for i, output in outputs.items():
            share = output.stats.seconds["total"] / counted if counted else 1 / len(outputs)
            turns[i].append((output, wall * share, asks[i].seed))
            # fschat's templates take an empty completion for the place of the next one
            messages[i].append({"role": "assistant", "content": output.text or " "})
    return [
        completed(question, own, one, config) for question, own in zip(group, turns, strict=True)
    ]


def completed(
    question: Question,
    turns: list[tuple[Output, float, int]],
    one: Contestant,
    config: EvalConfig,
) -> Completion:
    """The entry of one question. turns: completion, seconds and seed of each."""
    total, stats = Stats(), [output.stats for output, _, _ in turns]
    for of_turn in stats:
        total.add(of_turn)
    return {
        "contestant": one.name,
        "question_id": question.question_id,
        "category": question.category,
        "turns": [output.text for output, _, _ in turns],
        "token_ids": [output.token_ids for output, _, _ in turns],
        "prompt_tokens": [of_turn.prompt_tokens for of_turn in stats],
        "new_tokens": [of_turn.new_tokens for of_turn in stats],
        "cycles": [of_turn.cycles for of_turn in stats],
        "wall": [seconds for _, seconds, _ in turns],
        "ended": [_ended_by(of_turn, config.max_new_tokens) for of_turn in stats],
        "seeds": [seed for _, _, seed in turns],
        "seconds": dict(total.seconds),
        "accept_lengths": [accepted + 1 for accepted in total.accepted],
        "drafted": total.drafted,
        "accepted": total.accepted_by_depth,
        "undrafted": total.undrafted,
        "time": time.time(),
    }


def _ended_by(stats: Stats, most: int) -> str:
    """What ended a completion."""
    if not stats.truncated:
        return "model"
    return "max_new_tokens" if stats.new_tokens >= most else "context"


def said(completion: Completion, explain: bool) -> str:
    """The line of progress of a completion. explain: with the meaning of τ."""
    spent = figures(
        sum(completion["new_tokens"]), sum(completion["cycles"]), sum(completion["wall"]), explain
    )
    return f"question {completion['question_id']}, {completion['contestant']}: {spent}"
