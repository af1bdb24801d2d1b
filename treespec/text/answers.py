"""Where the answers of a conversation stand in its text.

An answer is what a message adds to the prompt that asks for it. Of ChatML:

    prompt  <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    whole   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                                 answer

Each answer is rendered as the last message of its conversation, as it was generated: templates of models that
think show the thoughts of the latest turn only, and gpt-oss' ends the last answer with a token of its own.
Where the template shows earlier messages as it did when they were last, one text holds all answers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from treespec.text.entries import REASONING_FIELDS, UnusableConversation, get_reasoning
from treespec.text.strings import count_common_prefix
from treespec.text.templates import Messages, Template, Tools
from treespec.text.turns import OPENED_THOUGHT, Chat, find_leading_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span: TypeAlias = tuple[int, int]  # [start, end) in characters
LOST_ANSWER = "an answer is lost in the chat template"


@dataclass(frozen=True)
class PlacedAnswer:
    """An answer in the text of its conversation.

    text: the conversation up to this answer. start, end: the characters of the answer with its end token.
    words_end: where its words end.
    """

    text: str
    start: int
    end: int
    words_end: int

    @property
    def said(self) -> str:
        return self.text[self.start : self.end]

    def has_thought(self, message: Mapping[str, Any]) -> bool:
        """Whether the thoughts of this answer, a message, lie before its words."""
        before = self.said
        if not message.get("tool_calls"):
            before = self.text[self.start : self.words_end].rstrip()
            before = before.removesuffix(get_words(message))
        return has_all_words(before, get_reasoning(message))


@dataclass
class TextRow:
    """A text to learn from, and the characters of the answers that count in it.

    Of a question H and its answer Y, which begin with <s> and <|head|>, the span (12, 17):

        <s>H<|head|>Y</s>
                    ^^^^^
    """

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class TextRows:
    """The rows of a conversation. thoughtless: answers that do not count, as the template drops their thoughts."""

    rows: list[TextRow] = field(default_factory=list)
    thoughtless: int = 0


def place_answers(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template = None,
    tools: Tools = None,
    cut: Sequence[bool] = (),
) -> TextRows:
    """The texts that the answers of a conversation are learnt from.

    Args:
        tokenizer: whose chat template renders the messages.
        messages: of a conversation. An answer whose `weight` is 0 does not count.
        template: the name of one of fschat's templates instead.
        tools: JSON schemas of the functions that the assistant may call.
        cut: for each answer whether a limit ended it, so that its end token is not the target's.

    Returns: one row if the template shows every answer as it was generated, else further ones.

    Raises: UnusableConversation if an answer is lost, InputError if the template refuses the messages.
    """
    chat = Chat(tokenizer, template, tools, thinks=any(map(get_reasoning, messages)))
    shown = [_show_thoughts(message) for message in messages]
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    flags = list(cut)
    if len(cut) != len(numbers):  # unknown which: any may be cut
        flags = [any(cut)] * len(numbers)
    answers = list[PlacedAnswer]()
    thoughtless = 0
    for number, is_cut in zip(numbers, flags, strict=True):
        if messages[number].get("weight") == 0:
            continue
        answer = place_answer(chat, shown[: number + 1])
        if not answer.has_thought(messages[number]):
            thoughtless += 1
            continue
        if is_cut:
            answer = replace(answer, end=answer.words_end)
        answers.append(answer)
    return TextRows(_share_rows(answers), thoughtless)


def _share_rows(answers: Sequence[PlacedAnswer]) -> list[TextRow]:
    """The rows of answers in their order. Earlier ones share the row of a later one that shows them unchanged."""
    rows = list[TextRow]()
    for answer in reversed(answers):
        row = _find_row(rows, answer.text[: answer.end])
        if row is None:
            row = TextRow(answer.text, [])
            rows.insert(0, row)
        row.spans.insert(0, (answer.start, answer.end))
    return rows


def _find_row(rows: Sequence[TextRow], start: str) -> TextRow | None:
    """The first row whose text begins so."""
    for row in rows:
        if row.text.startswith(start):
            return row
    return None


def place_answer(chat: Chat, messages: Messages) -> PlacedAnswer:
    """The last message, an answer, in the text of all.

    Raises UnusableConversation if the template loses its words or calls, and InputError if it refuses them.
    """
    # 1. The texts with it and before it.
    before = messages[:-1]
    message = messages[-1]
    prompt = chat.render(before, prompt=True)
    whole = chat.render(messages)
    closing = _find_closing(chat, messages, whole)

    # 2. Where it starts. A thought that history never shows may stand in the content as it was generated.
    raw = _read_raw_thought(prompt, message["content"])
    if raw is not None and not has_all_words(whole, get_reasoning(message)):
        text = prompt + raw + closing
        start = len(prompt)
    else:
        text, start = _find_start(chat, messages, prompt, whole)

    # 3. Where it ends, with all its words between.
    words_end = max(start, len(text) - len(closing))
    answer = _find_end(chat, messages, PlacedAnswer(text, start, len(text), words_end))
    for word in _list_call_words(message.get("tool_calls")):
        if not any(spelling in answer.said for spelling in _list_spellings(word)):
            raise UnusableConversation("a tool call is lost in the chat template")
    if not has_all_words(answer.said, get_words(message)):
        raise UnusableConversation(LOST_ANSWER)
    return answer


def get_words(message: Mapping[str, Any]) -> str:
    """The words of an answer without thoughts among them. Templates trim them."""
    return str(message["content"]).rpartition("</think>")[2].strip()


def has_all_words(text: str, words: str) -> bool:
    """Whether the text holds these words. Some templates change the spaces between."""
    return " ".join(words.split()) in " ".join(text.split())


def _show_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under every name that templates read them from, and without its weight."""
    shown = {name: value for name, value in message.items() if name != "weight"}
    if any(message.get(name) for name in REASONING_FIELDS):
        shown |= dict.fromkeys(REASONING_FIELDS, get_reasoning(shown))
    return shown


def _read_raw_thought(prompt: str, content: str) -> str | None:
    """What the target wrote after a prompt that opens a thought; None if the content is no such text.

    The content may repeat the opening.
    """
    opened = OPENED_THOUGHT.search(prompt)
    if not opened or "</think>" not in content:
        return None
    return content.removeprefix(opened[0]).removeprefix(opened[1])


def _find_start(chat: Chat, messages: Messages, prompt: str, whole: str) -> tuple[str, int]:
    """The text of a conversation, and where its last answer starts. Raises UnusableConversation.

    prompt: the text that asks for the answer. whole: the text with it.
    """
    before = messages[:-1]
    message = messages[-1]
    opens_thought = OPENED_THOUGHT.search(prompt) is not None
    shows_prompt = whole.startswith(prompt)
    if shows_prompt and (get_reasoning(message) or not opens_thought):
        return whole, _find_start_behind(chat, before, prompt, whole)

    # History does not show how the prompt ends: an empty thought, or one that the template opens.
    header = chat.render_header(before)
    silent = chat.render(before)
    if whole.startswith(silent) and whole.startswith(header):
        if prompt.startswith(header) and not opens_thought:
            return prompt + whole[len(header) :], len(prompt)
        return whole, len(header)

    # It shows earlier messages otherwise: gpt-oss' without the thoughts before calls once there is an answer.
    asking = ""
    if prompt.startswith(silent):
        asking = prompt.removeprefix(silent)
    asked = header[: header.rfind(asking) + len(asking)]
    if not asking.strip() or asking not in header or not whole.startswith(asked):
        raise UnusableConversation(LOST_ANSWER)
    return prompt + whole[len(asked) :], len(prompt)


def _find_start_behind(chat: Chat, before: Messages, prompt: str, whole: str) -> int:
    """Where an answer starts behind its prompt: behind its header, if the template has no generation prompt."""
    if chat.turn_format.asks:
        return len(prompt)
    header = chat.render_header(before)
    if whole.startswith(header) and header[len(prompt) :].strip():
        return len(header)
    return len(prompt)


def _find_closing(chat: Chat, messages: Messages, whole: str) -> str:
    """What the text has behind the words of the last message: calls, what ends the answer, and the rest.

    Digits after the words tell where these end. Raises UnusableConversation if the template loses words or calls.
    """
    # 1. Without the calls the text is another one.
    before = list(messages[:-1])
    message = messages[-1]
    calls_start = len(whole)
    if message.get("tool_calls"):
        plain = dict(message)
        del plain["tool_calls"]
        calls_start = count_common_prefix(whole, chat.try_render(before + [plain]))
        if calls_start == len(whole):
            raise UnusableConversation("the chat template shows no tool calls")

    # 2. The words.
    words = message["content"]
    if not words.strip():
        return whole[calls_start:]
    mark = "70"
    while mark in whole:
        mark += "70"[len(mark) % 2]
    marked = chat.render(before + [message | {"content": words + mark}])
    closing = marked.rpartition(mark)[2]
    if mark not in marked or not whole.endswith(closing):
        raise UnusableConversation(LOST_ANSWER)
    return closing


def _find_end(chat: Chat, messages: Messages, answer: PlacedAnswer) -> PlacedAnswer:
    """The answer with the token that ends it.

    A special token after its words does, and after calls the last one that stays when the conversation goes on.
    Where the template ends answers with none, the first token of the next turn does.
    """
    text = answer.text
    after = answer.words_end
    has_calls = bool(messages[-1].get("tool_calls"))
    if chat.turn_format.closes:
        special = re.finditer(chat.turn_format.special, text[after:])
        ends = [after + token.end() for token in special]
        if has_calls:
            kept = count_common_prefix(text, chat.render_next_turn(messages))
            staying = [end for end in ends if end <= kept]
            ends = (staying or ends)[-1:]
        if ends:
            return replace(answer, end=ends[0])
    elif has_calls or not text[after:].strip():
        last = _find_next_turn(chat, messages, text)
        if last:
            return replace(answer, text=text + last, end=len(text) + len(last))
    return replace(answer, end=after + len(text[after:].rstrip(" ")))


def _find_next_turn(chat: Chat, messages: Messages, text: str) -> str:
    """The special token that the turn after an answer begins with; "" for none."""
    if messages[-1].get("tool_calls"):
        following = chat.render_next_turn(messages)
        if following.startswith(text):
            return find_leading_token(chat.turn_format.special, following.removeprefix(text))
    return chat.turn_format.next_turn


def _list_call_words(value: object) -> list[str]:
    """The names and the texts and numbers within the arguments of calls."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, str | int | float):
        return [str(value)]
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts = [part for name, part in value.items() if name not in ("id", "type")]
    elif isinstance(value, Sequence):
        parts = list(value)
    words = list[str]()
    for part in parts:
        words += _list_call_words(part)
    return words


def _list_spellings(word: str) -> list[str]:
    """The word as it is, and as JSON writes it."""
    return [word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]]
