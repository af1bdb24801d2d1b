"""Questions that the target writes itself, with --from-template: it continues the user's turn of its template.

Magpie (Xu et al. 2024, 2406.08464). A chat model was trained on whole conversations, so it writes a
question after the tokens that open a user's turn. ChatML's template, cut at the bars:

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
# The replacement character, and control characters except \n, \t and \r.
UNSEEN_PATTERN = re.compile(rf"[\x00-\x08\x0b\x0c\x0e-\x1f{INCOMPLETE_CHARACTER}]")
MIN_DISTINCT_SHARE = 0.5  # least share of distinct ones among a question's runs of three words


def build_question_writer(
    engine: Engine, config: RegenerateConfig, done_lines: list[dict[str, Any]]
) -> Callable[[str], str]:
    """Make the function (key of a row) -> its question. The seed of the question follows from the key.

    done_lines: lines of earlier runs, whose questions must not repeat. The function raises LeftOut for a
    useless question, and for a question that another row has.
    """
    turn = find_user_turn(engine.spec)
    options = config.to_sampling_options(greedy=False)
    options["max_new_tokens"] = config.question_tokens
    options["stop"] = (turn.end,)
    rows = {normalize_question(line["messages"][0]["content"]): line["row"] for line in done_lines}

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
    """The text around a question in a chat template.

    Attributes:
        opening: the token ids before the question.
        end: the string after it.
    """

    opening: list[int]
    end: str


def find_user_turn(spec: Spec) -> UserTurn:
    """Find the opening and the end of a user's turn in the target's template.

    Raises InputError for a template without text on both sides of the question.
    """
    tokenizer: Any = spec.target.tokenizer
    if tokenizer is None:
        raise InputError("the target has no tokenizer: --from-template needs its chat template")
    text = templates.render(tokenizer, [{"role": "user", "content": QUESTION_MARK}], spec.template)
    opening_text, _, ending_text = text.rpartition(QUESTION_MARK)
    special = sorted(templates.list_special_tokens(tokenizer), key=len, reverse=True)
    end = ending_text.strip()
    for token in reversed(special):  # the longest one counts
        if ending_text.lstrip().startswith(token):
            end = token
    if not opening_text or not end:
        raise InputError("the chat template does not mark a user's turn on both sides: give --data")
    ids: list[int] = tokenizer(opening_text.rstrip(" "), add_special_tokens=False)["input_ids"]
    start = templates.list_start_tokens(tokenizer, spec.template)
    if ids[: len(start)] != start:
        ids = start + ids
    return UserTurn(ids, end)


def find_problem(question: str, cut: bool, filter: str) -> str | None:
    """Find why a question is useless; None for a good question."""
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
    """Normalize a question to lower case without punctuation, so that near-equal questions become equal."""
    return " ".join(re.findall(r"\w+", question.lower()))
