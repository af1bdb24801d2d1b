"""Where answers stand in text that a chat template formatted already."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from treespec.errors import InputError
from treespec.text.answers import Span, place_answer
from treespec.text.entries import UnusableConversation
from treespec.text.templates import Template
from treespec.text.turns import (
    OPENED_THOUGHT,
    PROBE_ANSWER,
    PROBE_CALL_ID,
    PROBE_QUESTION,
    PROBE_RESULT,
    Chat,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE_FUNCTION = {"name": "look", "arguments": {"at": "1"}}
PROBE_CALL = {"type": "function", "id": PROBE_CALL_ID, "function": PROBE_FUNCTION}


@dataclass(frozen=True)
class Marks:
    """How a template marks answers. Of ChatML:

        <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                        header               answer end

    header: the text before an answer. ends: the tokens or texts that end one: the last, an earlier one, and
    one that calls a tool.
    """

    header: str
    ends: tuple[str, ...]


@lru_cache(maxsize=4)
def find_marks(tokenizer: "PreTrainedTokenizerBase", template: Template) -> Marks:
    """The marks of a template, "" for none. Raises InputError if it shows no answer, and as `render`."""
    # 1. One conversation of a target that may think, with and without its answer.
    chat = Chat(tokenizer, template, thinks=True)
    asked = [{"role": "user", "content": PROBE_QUESTION}]
    answered = asked + [{"role": "assistant", "content": PROBE_ANSWER}]
    whole = chat.render(answered)
    prompt = chat.render(asked, prompt=True)
    silent = chat.render(asked)
    if PROBE_ANSWER not in whole or PROBE_QUESTION not in whole:
        raise InputError("the chat template shows no answer: give messages instead of text")
    before, _, after = whole.partition(PROBE_ANSWER)

    # 2. The header: the generation prompt without the thought that it opens. Without one, or where history
    #    shows another one, what stands between question and answer: up to the prompt's end where it is there.
    header = ""
    if prompt.startswith(silent):
        header = prompt.removeprefix(silent)
    header = OPENED_THOUGHT.sub("", header)
    if not header.strip() or not before.startswith(silent + header):
        if before.startswith(prompt) and not before[len(prompt) :].strip():
            before = prompt
        header = before.rpartition(PROBE_QUESTION)[2]

    # 3. The ends: special tokens, else all that follows.
    following = chat.render(answered + asked).partition(PROBE_ANSWER)[2]
    ends = []
    for text in (after, following):
        if end := re.search(chat.turn_format.special, text):
            ends.append(end[0])
    ends += _call_end(chat, asked)
    if not ends:
        ends.append(after.strip(" "))
    return Marks(header, tuple(dict.fromkeys(ends)))


def _call_end(chat: Chat, asked: list[dict[str, Any]]) -> list[str]:
    """The special token that ends an answer which calls a tool, in a list; [] for none."""
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
    try:
        answer = place_answer(chat, asked + [call])
        chat.render(asked + [call, PROBE_RESULT])
    except InputError:
        return []
    return re.findall(chat.turn_format.special, answer.said)[-1:]


def find_spans(text: str, marks: Marks) -> list[Span]:
    """[start, end) in characters of each answer in formatted text, with the mark that ends it.

    An answer in several parts, each behind the header right after another's end, is one. The last answer may
    lack its end. Raises UnusableConversation for a text without an answer, and InputError if the template
    marks none.
    """
    if not marks.header.strip() or not all(marks.ends):
        raise InputError("the chat template does not mark answers: give messages instead of text")
    header = re.escape(marks.header)
    ends = "|".join(map(re.escape, marks.ends))
    spans = list[Span]()
    for found in re.finditer(rf"{header}(.*?(?:{ends}|\Z))", text, re.DOTALL):
        start = found.start(1)
        if spans and found.start() == spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, found.end()))
    if not spans:
        raise UnusableConversation("no answer in the text", f"it lacks {marks.header!r}")
    return spans
