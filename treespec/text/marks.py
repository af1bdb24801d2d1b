"""Locate answers in text that a chat template has formatted already."""

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from treespec.errors import InputError
from treespec.text.answers import Span, place_answer
from treespec.text.templates import Template
from treespec.text.token_rows import UnusableConversation
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
    """The texts around answers in a template. In ChatML:

        <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                        header               answer end

    Attributes:
        header: the text before an answer.
        ends: the tokens or texts that end an answer: the last one, an earlier one, and one that calls a tool.
    """

    header: str
    ends: tuple[str, ...]


@lru_cache(maxsize=4)
def find_marks(tokenizer: "PreTrainedTokenizerBase", template: Template) -> Marks:
    """Find the marks of a template from a small conversation; an empty text means that there is no mark.

    Raises: InputError if the template shows no answer, or as `render` does.
    """
    # 1. Render a conversation of a target that may think, with and without its answer.
    chat = Chat(tokenizer, template, thinks=True)
    question = [{"role": "user", "content": PROBE_QUESTION}]
    conversation = question + [{"role": "assistant", "content": PROBE_ANSWER}]
    full_text = chat.render(conversation)
    prompt = chat.render(question, prompt=True)
    history_text = chat.render(question)
    if PROBE_ANSWER not in full_text or PROBE_QUESTION not in full_text:
        raise InputError("the chat template shows no answer: give messages instead of text")
    text_before, _, text_after = full_text.partition(PROBE_ANSWER)

    # 2. The header is the generation prompt without an opened thought. If there is no generation prompt, or if
    #    history shows a different one, it is the text between question and answer, cut at the prompt's end.
    header = ""
    if prompt.startswith(history_text):
        header = prompt.removeprefix(history_text)
    header = OPENED_THOUGHT.sub("", header)
    if not header.strip() or not text_before.startswith(history_text + header):
        if text_before.startswith(prompt) and not text_before[len(prompt) :].strip():
            text_before = prompt
        header = text_before.rpartition(PROBE_QUESTION)[2]

    # 3. The ends are special tokens, else all text after the answer.
    text_after_in_history = chat.render(conversation + question).partition(PROBE_ANSWER)[2]
    ends = []
    for text in (text_after, text_after_in_history):
        if end := re.search(chat.turn_format.special, text):
            ends.append(end[0])
    ends += _call_end(chat, question)
    if not ends:
        ends.append(text_after.strip(" "))
    return Marks(header, tuple(dict.fromkeys(ends)))


def _call_end(chat: Chat, question: list[dict[str, Any]]) -> list[str]:
    """A list of the special token that ends an answer with a tool call; [] if no special token does."""
    call: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
    try:
        answer = place_answer(chat, question + [call])
        chat.render(question + [call, PROBE_RESULT])
    except InputError:
        return []
    return re.findall(chat.turn_format.special, answer.said)[-1:]


def find_spans(text: str, marks: Marks) -> list[Span]:
    """Find the answers in a formatted text.

    Answers that follow each other without text between end mark and header are one answer. The last answer may lack
    its end mark.

    A question H and its answer Y, in a template whose turns begin with <s> and <|head|>, have the span (12, 17):

        <s>H<|head|>Y</s>
                    ^^^^^

    Returns: [start, end) in characters of each answer, with its end mark.

    Raises:
        UnusableConversation: for a text without an answer.
        InputError: if the template has no marks.
    """
    if not marks.header.strip() or not all(marks.ends):
        raise InputError("the chat template does not mark answers: give messages instead of text")
    header = re.escape(marks.header)
    ends = "|".join(map(re.escape, marks.ends))
    spans = list[Span]()
    for match in re.finditer(rf"{header}(.*?(?:{ends}|\Z))", text, re.DOTALL):
        start = match.start(1)
        if spans and match.start() == spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, match.end()))
    if not spans:
        raise UnusableConversation("no answer in the text", f"it lacks {marks.header!r}")
    return spans
