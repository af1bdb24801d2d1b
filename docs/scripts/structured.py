"""Tokens/s of answers by a JSON schema: one token at a time, with trees, and with forced tokens."""

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from treespec import load
from treespec.api.spec import Spec
from treespec.decoding.stats import Stats
from treespec.shaping.shaper import Shaper

WORD = {"type": "string", "maxLength": 40}
TASKS: list[tuple[str, dict[str, Any]]] = [
    (
        "Describe the planet Mars as JSON with name, radius_km, moons and colour.",
        {"name": WORD, "radius_km": {"type": "integer"}, "moons": {"type": "array", "items": WORD}}
        | {"colour": {"enum": ["red", "blue", "grey", "brown"]}},
    ),
    (
        "Extract as JSON: Ada Lovelace, born in London in 1815, wrote the first program.",
        {
            "first_name": WORD,
            "last_name": WORD,
            "birth_place": WORD,
            "birth_year": {"type": "integer"},
        },
    ),
    (
        "Write a recipe for pancakes as JSON with title, servings, ingredients and minutes.",
        {"title": WORD, "servings": {"type": "integer", "minimum": 1, "maximum": 12}}
        | {"ingredients": {"type": "array", "items": WORD, "maxItems": 5}}
        | {"minutes": {"type": "integer", "minimum": 1, "maximum": 240}},
    ),
    (
        "Is this review good or bad? 'The food was cold and the waiter rude.' Answer as JSON.",
        {"sentiment": {"enum": ["positive", "negative", "mixed"]}, "reason": WORD},
    ),
]


class Unforced:
    """The same masks, without a word about forced tokens."""

    def __init__(self, shaper: Shaper) -> None:
        self.shaper = shaper

    def begin(self, prompt: Sequence[int]) -> "Unforced":
        return Unforced(self.shaper.begin(prompt))

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        return self.shaper.shape(answer, paths, logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tasks", type=int, default=len(TASKS))
    options = parser.parse_args()
    spec = load(options.target, options.head, dtype="float32")  # else rounding breaks ties
    ways = {
        "one token at a time": (spec.baseline(), True),
        "trees": (spec, False),
        "trees and forced tokens": (spec, True),
    }

    # 1. Every way in turn, so that the machine's other work slows all of them alike.
    found: dict[str, list[list[Stats]]] = {name: [] for name in ways}
    for number in range(1 + options.rounds):
        stats: dict[str, list[Stats]] = {name: [] for name in ways}
        for seed, (question, properties) in enumerate(TASKS[: options.tasks]):
            texts = set()
            for name, (way, forced) in ways.items():
                text, one = answer(way, forced, question, properties, seed, options)
                texts.add(text)
                stats[name].append(one)
            assert options.temperature or len(texts) == 1, texts
        for name in ways if number else ():  # the first round warms up
            found[name].append(stats[name])

    # 2. The median round of each.
    print("| | tokens/s | τ | by one token at a time |")
    print("|---|---|---|---|")
    base = [rate(one) for one in found["one token at a time"]]
    for name, rounds in found.items():
        rates = [rate(one) for one in rounds]
        gain = statistics.median(a / b for a, b in zip(rates, base, strict=True))
        every = [one for stats in rounds for one in stats]
        length = sum(one.new_tokens for one in every) / sum(one.cycles for one in every)
        print(f"| {name} | {statistics.median(rates):.1f} | {length:.2f} | {gain:.2f} |")


def answer(
    spec: Spec,
    forced: bool,
    question: str,
    properties: dict[str, Any],
    seed: int,
    options: argparse.Namespace,
) -> tuple[str, Stats]:
    """An answer by a schema of these properties, all required.

    forced: whether forced tokens are drafted.
    """
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    prompt = question
    if getattr(spec.target.tokenizer, "chat_template", None):
        prompt = [{"role": "user", "content": question}]
    text = spec.request(
        prompt,
        json_schema=json.dumps(schema | {"additionalProperties": False}),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=seed,
    )
    if not forced:
        text.law.shapers = tuple(Unforced(shaper) for shaper in text.law.shapers)
    words = "".join(piece.text for _, piece in spec.decoder.run([text]))
    return words, text.stats


def rate(stats: Sequence[Stats]) -> float:
    """Tokens per second of several answers, prompts included."""
    return sum(one.new_tokens for one in stats) / sum(one.seconds["total"] for one in stats)


if __name__ == "__main__":
    main()
