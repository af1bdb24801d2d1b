"""Answers in text that somebody formatted with the target's chat template already.

The template tells how such text marks an answer. Of ChatML:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                    header               answer end
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treespec.errors import InputError
from treespec.text.entries import UnusableConversation
from treespec.text.templates import Template, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION, ANSWER = "What is asked", "What is said"  # a conversation to look at


@dataclass(frozen=True)
class Marks:
    """header: the text before an answer. end: the token or text that ends it."""

    header: str
    end: str


def marks_of(
    tokenizer: "PreTrainedTokenizerBase", template: Template, special: Iterable[str]
) -> Marks:
    """The marks of a template. special: the tokenizer's special tokens.

    Raises InputError where the template marks no answers, and as `render`.
    """
    # 1. One conversation, with and without its answer.
    asked = [{"role": "user", "content": QUESTION}]
    whole = render(tokenizer, [*asked, {"role": "assistant", "content": ANSWER}], template, False)
    prompt = render(tokenizer, asked, template)
    silent = render(tokenizer, asked, template, False)
    if ANSWER not in whole or QUESTION not in whole:
        raise InputError("the chat template shows no answer: give messages in place of text")
    before, _, after = whole.partition(ANSWER)

    # 2. The header: the generation prompt without the thought that it opens, else what stands
    #    between question and answer.
    header = prompt.removeprefix(silent) if prompt.startswith(silent) else ""
    header = re.sub(r"<think>\s*\Z", "", header) or before.rpartition(QUESTION)[2]

    # 3. The end: the first special token, else all that follows.
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    found = re.match(rf"\s*({names})", after)
    end = found[1] if found else after.strip(" ")
    if not header.strip() or not end:
        raise InputError("the chat template does not mark answers: give messages in place of text")
    return Marks(header, end)


def spans_of(text: str, marks: Marks) -> list[tuple[int, int]]:
    """[start, end) in characters of each answer with the mark that ends it.

    The last answer may lack its end. Raises UnusableConversation for a text without an answer.
    """
    spans = []
    place = text.find(marks.header)
    while place >= 0:
        start = place + len(marks.header)
        ended = text.find(marks.end, start)
        end = len(text) if ended < 0 else ended + len(marks.end)
        spans.append((start, end))
        place = text.find(marks.header, end)
    if not spans:
        raise UnusableConversation("no answer in the text", f"it lacks {marks.header!r}")
    return spans
