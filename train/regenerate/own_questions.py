"""Questions that the target writes itself: it continues the user's turn of its own chat template.

Xu et al. 2024 (Magpie, 2406.08464). A chat model was trained on whole conversations, so after the words
that open a user's turn it writes a question. Of ChatML's template, cut at the marks:

    <|im_start|>system …<|im_end|> <|im_start|>user |QUESTION| <|im_end|> <|im_start|>assistant
    the prompt                                              the end of the question
"""

import re
from collections.abc import Iterator
from typing import Any

from treespec.api.spec import Spec
from treespec.decoding.sequence import Text
from treespec.errors import InputError
from treespec.files.lines import Lines
from treespec.text import templates
from treespec.text.ending import INCOMPLETE
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.english import passes
from treespec.train.regenerate.rows import Row, drawn, row_of

MARK = "QUESTION"
DRAFTS = 20  # questions that are written for one that is kept, before the target is given up
REPEATS = 0.5  # least share of different ones among a question's runs of three words


def own_rows(spec: Spec, config: RegenerateConfig, kept: Lines) -> list[Row]:
    """The rows of as many questions as are asked for. kept: those of a run before, then of this one.

    A question's draws follow from its number; a repeated one is left out in favour of the lower number.
    Raises InputError for a temperature of 0, and where nearly all questions are broken or repeated.
    """
    # 1. What a run before has kept.
    wanted = config.from_template or 0
    questions = {line["question"]: line["number"] for line in kept.done if "question" in line}
    number, seen = len(kept.done), {normal(question) for question in questions}

    # 2. Drafts in order of their numbers, until enough are good.
    while len(questions) < wanted:
        most = DRAFTS * wanted
        if number >= most:
            raise InputError(
                f"of {number} questions that the target wrote, {number - len(questions)} are broken or repeated "
                f"({reasons(kept)}): give --data, or a --from-template of at most {len(questions)}"
            )
        some = range(number, min(number + 4 * config.batch, most))
        for question, problem in drafts(spec, config, some):
            if len(questions) == wanted:
                break
            if not problem and normal(question) in seen:
                problem = "repeated"
            outcome = ("problem", problem) if problem else ("question", question)
            line = dict([("number", number), outcome])
            kept.append(line)
            kept.done.append(line)
            if not problem:
                questions[question] = number
                seen.add(normal(question))
            number += 1
    asked_for = list(questions.items())[:wanted]
    return [row_of(f"template-{number}", None, [question]) for question, number in asked_for]


def drafts(
    spec: Spec, config: RegenerateConfig, numbers: range
) -> Iterator[tuple[str, str | None]]:
    """Questions by number, each with what is wrong with it, if anything is."""
    # 1. One text a number, each with draws of its own.
    prompt, stop = user_turn(spec)
    options = config.sampling(greedy=False)
    options |= {"max_new_tokens": config.question_tokens, "stop": stop}
    said: dict[Text, list[str]] = {}
    for number in numbers:
        seed = drawn(config.seed, f"template-{number}", "question")
        said[spec.request(prompt, seed=seed, **options)] = []

    # 2. Decode them together.
    ids: dict[Text, list[int]] = {text: [] for text in said}
    for text, piece in spec.decoder.run(list(said), config.batch):
        said[text].append(piece.text)
        ids[text] += piece.token_ids

    # 3. What is wrong with each.
    special = set(templates.special_tokens(spec.target.tokenizer).values())
    for text, parts in said.items():
        question = "".join(parts).strip()
        inside = ids[text][:-1]
        cut = not text.ending.left and ids[text][-1] not in text.ending.eos
        yield question, problem_of(question, cut, bool(special.intersection(inside)), config.filter)


def user_turn(spec: Spec) -> tuple[list[int], tuple[str, ...]]:
    """The token ids that open a user's turn, and the strings that end it.

    Raises InputError for a template that does not say where a question lies.
    """
    tokenizer: Any = spec.target.tokenizer
    if tokenizer is None:
        raise InputError("the target has no tokenizer: --from-template needs its chat template")
    text = templates.render(tokenizer, [{"role": "user", "content": MARK}], spec.template)
    before, mark, after = text.rpartition(MARK)
    special = sorted(templates.special_tokens(tokenizer), key=len, reverse=True)
    end = next((token for token in special if after.lstrip().startswith(token)), after.strip())
    if not mark or not before or not end:
        raise InputError("the chat template does not mark a user's turn on both sides: give --data")
    ids: list[int] = tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
    start = templates.opening(tokenizer, spec.template)
    return (ids if ids[: len(start)] == start else start + ids), (end,)


def problem_of(question: str, cut: bool, special: bool, filter: str) -> str | None:
    """Why a question is of no use; None for one that is."""
    words = question.split()
    if cut:
        return "no end"
    if not any(character.isalpha() for character in question):
        return "empty"
    if (
        special
        or INCOMPLETE in question
        or any(ord(c) < 32 and c not in "\n\t\r" for c in question)
    ):
        return "broken characters"
    runs = list(zip(words, words[1:], words[2:], strict=False))
    if runs and len(set(runs)) < REPEATS * len(runs):
        return "repeats itself"
    return None if passes(question, filter) else f"not {filter}"


def normal(question: str) -> str:
    """What two questions have in common that differ in case, spaces and punctuation alone."""
    return " ".join(re.findall(r"\w+", question.lower()))


def reasons(kept: Lines) -> str:
    counts: dict[str, int] = {}
    for line in kept.done:
        if problem := line.get("problem"):
            counts[problem] = counts.get(problem, 0) + 1
    return ", ".join(
        f"{problem}: {count}"
        for problem, count in sorted(counts.items(), key=lambda item: -item[1])
    )
