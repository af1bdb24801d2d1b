"""Questions that the target writes, with --from-template: it continues the user's turn of its template.

Magpie (Xu et al. 2024, 2406.08464). A chat model was trained on whole conversations, so after the
words that open a user's turn it writes a question. Of ChatML's template, cut at the marks:

    <|im_start|>system …<|im_end|> <|im_start|>user |QUESTION| <|im_end|> <|im_start|>assistant
    the prompt                                              the end of the question
"""

import re
from collections import Counter
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import Any

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.files.lines import Lines
from treespec.text import templates
from treespec.text.strings import INCOMPLETE
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.questions import Row, drawn, passes, row_of

MARK = "QUESTION"
DRAFTS = 20  # questions that are written for one that is kept, before the target is given up
REPEATS = 0.5  # least share of different ones among a question's runs of three words


def own_rows(engine: Engine, config: RegenerateConfig, kept: Lines) -> list[Row]:
    """The rows of as many questions as are requested. kept: those of a run before, then of this one.

    A question's draws follow from its number; a repeated one is left out in favour of the lower
    number. Raises InputError where nearly all questions are broken or repeated.
    """
    # 1. What a run before has kept.
    wanted = config.from_template or 0
    questions = {line["question"]: line["number"] for line in kept.done if "question" in line}
    seen, draft = set(map(normal, questions)), drafting(engine, config)

    # 2. Drafts in order of their numbers, until enough are good.
    with ThreadPool(config.batch) as pool:
        while len(questions) < wanted:
            number, most = len(kept.done), DRAFTS * wanted
            if number >= most:
                problems = Counter(line["problem"] for line in kept.done if "problem" in line)
                reasons = ", ".join(f"{what}: {count}" for what, count in problems.most_common())
                raise InputError(
                    f"of {number} questions that the target wrote, {number - len(questions)} are "
                    f"broken or repeated ({reasons}): give --data, or a --from-template of at most "
                    f"{len(questions)}"
                )
            numbers = range(number, min(number + 4 * config.batch, most))
            for number, (question, problem) in zip(numbers, pool.imap(draft, numbers), strict=True):
                if len(questions) == wanted:
                    break
                if not problem and normal(question) in seen:
                    problem = "repeated"
                if problem:
                    kept.append({"number": number, "problem": problem})
                else:
                    kept.append({"number": number, "question": question})
                    questions[question] = number
                    seen.add(normal(question))
    chosen = list(questions.items())[:wanted]
    return [row_of(f"template-{number}", None, [question]) for question, number in chosen]


def drafting(engine: Engine, config: RegenerateConfig) -> Callable[[int], tuple[str, str | None]]:
    """(number) -> the question of that number, and what is wrong with it, if anything is."""
    prompt, stop = user_turn(engine.spec)
    options = config.sampling(greedy=False)
    options |= {"max_new_tokens": config.question_tokens, "stop": stop}
    special = set(templates.special_tokens(engine.spec.target.tokenizer).values())

    def draft(number: int) -> tuple[str, str | None]:
        seed = drawn(config.seed, f"template-{number}", "question")
        output = engine.submit(prompt, seed=seed, **options).result()
        question, odd = output.text.strip(), bool(special.intersection(output.token_ids[:-1]))
        return question, problem_of(question, output.stats.truncated, odd, config.filter)

    return draft


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
