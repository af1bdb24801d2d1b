"""Where the answers of a conversation stand in its text."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from treespec.errors import InputError
from treespec.text.entries import UnusableConversation
from treespec.text.templates import (
    Messages,
    Template,
    Tools,
    render,
    special_tokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span: TypeAlias = tuple[int, int]  # [start, end) in characters


@dataclass(frozen=True)
class Marks:
    """How a template marks an answer. Of ChatML:

        <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                        header               answer end

    header: the text before an answer. end: the token or text that ends it. special: a pattern of
    the tokenizer's special tokens.
    """

    header: str
    end: str
    special: str


QUESTION, ANSWER = "1234 5678", "8765 4321"  # a conversation to look at


@lru_cache(maxsize=4)
def marks_of(tokenizer: "PreTrainedTokenizerBase", template: Template) -> Marks:
    """The marks of a template, "" for none. Raises InputError where it shows no answer, and as `render`."""
    # 1. One conversation, with and without its answer.
    asked = [{"role": "user", "content": QUESTION}]
    whole = render(tokenizer, [*asked, {"role": "assistant", "content": ANSWER}], template, False)
    prompt, silent = render(tokenizer, asked, template), render(tokenizer, asked, template, False)
    if ANSWER not in whole or QUESTION not in whole:
        raise InputError("the chat template shows no answer: give messages instead of text")
    before, _, after = whole.partition(ANSWER)

    # 2. The header: the generation prompt without the thought that it opens. Without one, what stands
    #    between question and answer: up to the prompt's end, or all of it where more words follow.
    header = prompt.removeprefix(silent) if prompt.startswith(silent) else ""
    header = re.sub(r"<think>\s*\Z", "", header)
    if not header.strip():
        served = before.startswith(prompt) and not before[len(prompt) :].strip()
        header = (prompt if served else before).rpartition(QUESTION)[2]

    # 3. The end: the first special token, else all that follows.
    names = sorted(special_tokens(tokenizer), key=len, reverse=True)
    special = "|".join(map(re.escape, names)) or "(?!)"
    found = re.match(rf"\s*({special})", after)
    return Marks(header, found[1] if found else after.strip(" "), special)


def spans_in(text: str, marks: Marks) -> list[Span]:
    """[start, end) in characters of each answer in formatted text, with the mark that ends it.

    The last answer may lack its end. Raises UnusableConversation for a text without an answer, and
    InputError where the template marks none.
    """
    if not marks.header.strip() or not marks.end:
        raise InputError("the chat template does not mark answers: give messages instead of text")
    header, end = re.escape(marks.header), re.escape(marks.end)
    answer = re.compile(rf"{header}(.*?(?:{end}|\Z))", re.DOTALL)
    spans = [found.span(1) for found in answer.finditer(text)]
    if not spans:
        raise UnusableConversation("no answer in the text", f"it lacks {marks.header!r}")
    return spans


def answers(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, template: Template, tools: Tools
) -> tuple[str, list[Span]]:
    """The text of a conversation, and the span of each answer with the token that ends it.

    Returns (text, spans). A span is [start, end) in characters. If the place of any answer is
    unknown, there are no spans.

    An answer stands behind the header of `marks_of`, and its words must lie inside its span.
    """
    # 1. The words of each message. Templates trim them, and leave out thoughts of earlier turns.
    words = [message["content"].rpartition("</think>")[2].strip() for message in messages]

    # 2. One message after the other.
    whole = render(tokenizer, messages, template, False, tools)
    marks, place, spans = marks_of(tokenizer, template), 0, []
    for i, word in enumerate(words):
        if messages[i]["role"] != "assistant":  # its words may be a header's
            place = max(place, whole.find(word, place) + len(word))
            continue
        start = whole.find(marks.header, place) + len(marks.header)
        if messages[i - 1]["role"] == "tool":  # what stands before such an answer may be no header
            prompt = render(tokenizer, messages[:i], template, True, tools)
            start = len(prompt) if whole.startswith(prompt) else start
        place = _answer_end(whole, marks, start, word, bool(messages[i].get("tool_calls")))
        spans.append((start, place))
        if start < len(marks.header) or not holds(whole, spans[-1], word):
            return whole, []
    return whole, spans


def _answer_end(text: str, marks: Marks, start: int, words: str, calls: bool) -> int:
    """Where an answer ends: at a special token right after its words, else at the end mark.

    calls: whether tool calls follow its words. Returns `start` where neither comes before the next answer.
    """
    # 1. Where the words end, up to the next answer. Some templates change the spaces between.
    turn = text.find(marks.header, start) if marks.header else -1
    limit = len(text) if turn < 0 else turn
    places, at = [], text.find(words, start, limit)
    while at >= 0:
        places.append(at + len(words))
        at = text.find(words, at + 1, limit)
    if not places:
        spaced = re.compile(r"\s+".join(map(re.escape, words.split())))
        places = [found.end() for found in spaced.finditer(text, start, limit)]
    if not places:
        return start

    # 2. The mark after them; the last answer may lack it.
    special = re.compile(rf"\s*({marks.special})")
    for place in () if calls else places:
        if ended := special.match(text, place, limit):
            return ended.end(1)
    end = text.find(marks.end, places[0], limit + len(marks.end))
    return end + len(marks.end) if end >= 0 else limit if turn < 0 else start


def holds(text: str, span: Span, words: str) -> bool:
    """Whether the span holds these words. Some templates change the spaces between."""
    return span[0] >= 0 and " ".join(words.split()) in " ".join(text[slice(*span)].split())
