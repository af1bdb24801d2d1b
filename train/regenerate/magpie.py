"""Questions that the target writes, with --from-template: it continues the user's turn of its template.

Magpie (Xu et al. 2024, 2406.08464). A chat model was trained on whole conversations, so after the
words that open a user's turn it writes a question. Of ChatML's template, cut at the marks:

    <|im_start|>system …<|im_end|> <|im_start|>user |QUESTION| <|im_end|> <|im_start|>assistant
    the prompt                                              the end of the question
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from treespec.api.engine import Engine
from treespec.api.spec import Spec
from treespec.errors import InputError
from treespec.text import templates
from treespec.text.strings import INCOMPLETE_CHARACTER
from treespec.train.regenerate.ask import LeftOut
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.questions import draw_number, matches_filter

QUESTION_MARK = "QUESTION"
# The replacement character, and control characters but \n, \t and \r.
UNSEEN_PATTERN = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f{INCOMPLETE_CHARACTER}]")
MIN_DISTINCT_SHARE = 0.5  # least share of different ones among a question's runs of three words


def build_question_writer(
    engine: Engine, config: RegenerateConfig, done: list[dict[str, Any]]
) -> Callable[[str], str]:
    """Make the function (key of a row) -> its question, whose draws follow from the key.

    done: lines of a run before. The function raises LeftOut for a question that is of no use, or that
    another row has.
    """
    turn = find_user_turn(engine.spec)
    options = config.to_sampling_options(greedy=False)
    options["max_new_tokens"] = config.question_tokens
    options["stop"] = (turn.end,)
    rows = {normalize_question(line["messages"][0]["content"]): line["row"] for line in done}

    def write(key: str) -> str:
        seed = draw_number(config.seed, key, "question")
        output = engine.submit(turn.opening, seed=seed, **options).result()
        question = output.text.strip()
        problem = find_problem(question, output.stats.truncated, config.filter)
        if not problem and rows.setdefault(normalize_question(question), key) != key:
            problem = "repeated"
        if problem:
            raise LeftOut(f"question: {problem}")
        return question

    return write


class UserTurn(NamedTuple):
    """What surrounds a question in a chat template. opening: token ids before it. end: the string after it."""

    opening: list[int]
    end: str


def find_user_turn(spec: Spec) -> UserTurn:
    """Find what opens a user's turn in the target's template, and what ends it.

    Raises InputError for a template that does not say where a question lies.
    """
    tokenizer: Any = spec.target.tokenizer
    if tokenizer is None:
        raise InputError("the target has no tokenizer: --from-template needs its chat template")
    text = templates.render(tokenizer, [{"role": "user", "content": QUESTION_MARK}], spec.template)
    before, _, after = text.rpartition(QUESTION_MARK)
    special = sorted(templates.list_special_tokens(tokenizer), key=len, reverse=True)
    end = after.strip()
    for token in reversed(special):  # the longest one counts
        if after.lstrip().startswith(token):
            end = token
    if not before or not end:
        raise InputError("the chat template does not mark a user's turn on both sides: give --data")
    ids: list[int] = tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
    start = templates.list_start_tokens(tokenizer, spec.template)
    if ids[: len(start)] != start:
        ids = start + ids
    return UserTurn(ids, end)


def find_problem(question: str, cut: bool, filter: str) -> str | None:
    """Why a question is of no use; None for one that is."""
    words = question.split()
    runs = list(zip(words, words[1:], words[2:], strict=False))
    if cut:
        return "no end"
    if not any(map(str.isalpha, question)):
        return "empty"
    if UNSEEN_PATTERN.search(question):
        return "broken characters"
    if len(set(runs)) < MIN_DISTINCT_SHARE * len(runs):
        return "repeats itself"
    if not matches_filter(question, filter):
        return f"not {filter}"
    return None


def normalize_question(question: str) -> str:
    """A question in lower case without punctuation: equal for two that differ only in these and in spaces."""
    return " ".join(re.findall(r"\w+", question.lower()))
