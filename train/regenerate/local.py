"""Answers of the target here: an engine decodes together what several threads ask.

A row's draws come from a generator of its own for each turn, so its answers do not depend on the
rows that run at the same time, but for rounding.
"""

from collections.abc import Callable
from typing import NamedTuple

from treespec.api.engine import Engine
from treespec.errors import InputError
from treespec.train.regenerate.config import RegenerateConfig

Messages = list[dict[str, str]]


class Answer(NamedTuple):
    """ended: by `model`, or by the limit `max_new_tokens`."""

    text: str
    tokens: int
    ended: str


class LeftOut(Exception):
    """A question that cannot be answered; the message says why. Its conversation ends before it."""


Ask = Callable[[Messages, int, bool], Answer]  # (messages, seed, whether at temperature 0)


def asking(engine: Engine, config: RegenerateConfig) -> Ask:
    """Asks the target of an engine."""
    tokenizer = engine.spec.target.tokenizer

    def ask(messages: Messages, seed: int, greedy: bool) -> Answer:
        question = tokenizer(messages[-1]["content"], add_special_tokens=False, verbose=False)
        if len(question["input_ids"]) > config.question_tokens:
            raise LeftOut("a question is too long")
        try:
            prompt = engine.spec.encode(messages)
            if len(prompt) + config.max_new_tokens > config.max_length:
                raise LeftOut("a conversation is too long")
            completion = engine.submit(prompt, seed=seed, **config.sampling(greedy))
        except InputError as error:
            raise LeftOut(f"cannot be asked: {error}") from error
        output = completion.result()
        ended = "max_new_tokens" if output.stats.truncated else "model"
        return Answer(output.text, output.stats.new_tokens, ended)

    return ask
