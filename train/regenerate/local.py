"""What the target itself does: it answers questions, and with --from-template writes them too.

Then it continues the user's turn of its own chat template (Magpie, Xu et al. 2024, 2406.08464). A
chat model was trained on whole conversations, so after the words that open a user's turn it writes a
question. Of ChatML's template, cut at the marks:

    <|im_start|>system …<|im_end|> <|im_start|>user |QUESTION| <|im_end|> <|im_start|>assistant
    the prompt                                              the end of the question
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, final

from treespec.api.spec import Spec
from treespec.decoding.sequence import Request
from treespec.errors import InputError
from treespec.files.lines import Lines
from treespec.text import templates
from treespec.text.strings import INCOMPLETE
from treespec.train.regenerate.config import RegenerateConfig
from treespec.train.regenerate.english import passes
from treespec.train.regenerate.questions import Answer, Answered, Row, drawn, row_of

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
            outcome = {"problem": problem} if problem else {"question": question}
            line = {"number": number} | outcome
            kept.append(line)
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
    seeds = [drawn(config.seed, f"template-{number}", "question") for number in numbers]
    texts = [spec.request(prompt, seed=seed, **options) for seed in seeds]

    # 2. Decode them together. What is wrong with each.
    written = {text: (said.strip(), ids) for text, said, ids in decoded(spec, texts, config.batch)}
    special = set(templates.special_tokens(spec.target.tokenizer).values())
    for text in texts:
        question, ids = written[text]
        cut = not text.ending.left and ids[-1] not in text.ending.eos
        odd = bool(special.intersection(ids[:-1]))
        yield question, problem_of(question, cut, odd, config.filter)


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
    counts = Counter(line["problem"] for line in kept.done if "problem" in line)
    return ", ".join(f"{problem}: {count}" for problem, count in counts.most_common())


@final
class Local:
    """Answers by a `Spec`, the short prompts first.

    A row's draws come from a generator of its own for each turn, so its answers do not depend on the
    rows beside it but for rounding.
    """

    def __init__(self, spec: Spec, config: RegenerateConfig) -> None:
        self.spec, self.config = spec, config
        self.ends = spec.target.eos | set(templates.stops(spec.template).token_ids)

    def answers(self, rows: Sequence[Answered]) -> Iterator[tuple[Answered, Answer | str]]:
        """Each row with the answer to its next question, or why it cannot be asked."""
        asked: dict[Request, Answered] = {}
        for one in rows:
            text = self._text(one)
            if isinstance(text, str):
                yield one, text
            else:
                asked[text] = one
        by_length = sorted(asked, key=lambda text: len(text.prompt))
        for text, said, ids in decoded(self.spec, by_length, self.config.batch):
            by_model = text.ending.left or ids[-1] in self.ends
            ended = "model" if by_model else "max_new_tokens"
            yield asked[text], Answer(said, len(ids), ended)

    def _text(self, one: Answered) -> Request | str:
        """The next turn of a row to decode, or why it cannot be asked."""
        messages, tokenizer = one.next_question, self.spec.target.tokenizer
        question = tokenizer(messages[-1]["content"], add_special_tokens=False, verbose=False)
        if len(question["input_ids"]) > self.config.question_tokens:
            return "a question is too long"
        seed = drawn(self.config.seed, one.row.key, len(one.answers))
        try:
            text = self.spec.request(messages, seed=seed, **self.config.sampling(one.greedy))
        except InputError as error:
            return f"cannot be asked: {error}"
        if len(text.prompt) + self.config.max_new_tokens > self.config.max_length:
            return "a conversation is too long"
        return text


def decoded(
    spec: Spec, texts: Sequence[Request], batch: int
) -> Iterator[tuple[Request, str, list[int]]]:
    """Each text with what was said and its token ids, as they are finished."""
    said: dict[Request, str] = dict.fromkeys(texts, "")
    ids: dict[Request, list[int]] = {text: [] for text in texts}
    for text, piece in spec.decoder.run(list(texts), batch):
        said[text] += piece.text
        ids[text] += piece.token_ids
        if text.ending.finished and len(ids[text]) == text.stats.new_tokens:
            yield text, said.pop(text), ids.pop(text)
