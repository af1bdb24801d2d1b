"""Where the answers of a conversation stand in its text.

An answer is what a message adds to the prompt that asks for it. Of ChatML:

    prompt  <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    whole   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                                 answer           rest

Each answer is rendered as the last message of its conversation, as it was generated: templates of models that
think show the thoughts of later turns only, and gpt-oss' ends the last answer with a token of its own.
Where the template shows earlier messages as it did when they were last, one text holds all answers.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from treespec.errors import InputError
from treespec.text.entries import THOUGHTS, UnusableConversation, thought_of
from treespec.text.strings import common_prefix
from treespec.text.templates import Messages, Template, Tools, render, special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span: TypeAlias = tuple[int, int]  # [start, end) in characters

QUESTION, ANSWER = "1234 5678", "8765 4321"  # a conversation to look at
CALL_ID = "call00001"  # nine letters and digits, as Mistral's template wants
TOOL_RESULT = {"role": "tool", "content": "1", "name": "look", "tool_call_id": CALL_ID}
# How a prompt ends that opens a thought: DeepSeek-R1's and Qwen's, Gemma 4's, Magistral's, Seed-OSS'.
OPENED_THOUGHT = re.compile(r"(<think>|<\|channel>thought|\[THINK\]|<seed:think>)\s*\Z")
# Variables that tell templates whether the target thinks: Qwen's, GLM's and Gemma's, then Granite's and DeepSeek's.
THINKING_VARIABLES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class Chat:
    """How a conversation is rendered. thinks: whether any of its answers has thoughts."""

    tokenizer: "PreTrainedTokenizerBase"
    template: Template
    tools: Tools = None
    thinks: bool = False

    def render(self, messages: Messages, prompt: bool = False) -> str:
        """The text of the messages. prompt: with what asks for an answer. Raises InputError."""
        variables = None
        if self.template is None:
            variables = dict.fromkeys(THINKING_VARIABLES, self.thinks)
        return render(self.tokenizer, messages, self.template, prompt, self.tools, variables)

    @property
    def turns(self) -> "Turns":
        """How the template writes turns. Raises InputError where it refuses a plain question."""
        source = str(getattr(self.tokenizer, "chat_template", ""))
        return read_turns(self.tokenizer, self.template, source)


@dataclass(frozen=True)
class Turns:
    """How a template writes turns.

    special: a pattern of the tokenizer's special tokens. asks: whether there is a generation prompt.
    closes: whether answers end with a special token. next: the special token that a user's turn begins with
    right behind an answer, "" for none: GLM's models end an answer with it.
    """

    special: str
    asks: bool
    closes: bool
    next: str


@lru_cache(maxsize=8)
def read_turns(tokenizer: "PreTrainedTokenizerBase", template: Template, source: str) -> Turns:
    """The turns of a template, from a question and its answer. source: of the template, as it may change."""
    names = sorted(special_tokens(tokenizer), key=len, reverse=True)
    special = "|".join(map(re.escape, names)) or "(?!)"
    chat, asked = Chat(tokenizer, template), [{"role": "user", "content": QUESTION}]
    prompt, silent = chat.render(asked, prompt=True), chat.render(asked)
    whole = chat.render([*asked, {"role": "assistant", "content": ANSWER}])
    after = whole.rpartition(ANSWER)[2]
    following = _continued(chat, [*asked, {"role": "assistant", "content": ANSWER}])
    begun = re.match(special, following.removeprefix(whole)) if following.startswith(whole) else None
    first = begun[0] if begun and begun[0] != tokenizer.bos_token else ""
    return Turns(special, prompt != silent, re.search(special, after) is not None, first)


@dataclass(frozen=True)
class Answer:
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

    def shows_thought(self, message: Mapping[str, Any]) -> bool:
        """Whether the thoughts of this answer, a message, lie before its words."""
        before = self.said
        if not message.get("tool_calls"):
            before = self.text[self.start : self.words_end].rstrip()
            before = before.removesuffix(words_of(message))
        return holds(before, thought_of(message))


@dataclass
class Row:
    """A text to learn from, and the characters of the answers that count in it."""

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class Placement:
    """The rows of a conversation, and the number of answers without the thoughts that the template drops."""

    rows: list[Row] = field(default_factory=list)
    thoughtless: int = 0


def place_answers(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Messages,
    template: Template = None,
    tools: Tools = None,
    cut: Sequence[bool] = (),
) -> Placement:
    """The texts that the answers of a conversation are learnt from.

    Args:
        tokenizer: whose chat template renders the messages.
        messages: of a conversation. An answer whose `weight` is 0 does not count.
        template: the name of one of fschat's templates instead.
        tools: JSON schemas of the functions that the assistant may call.
        cut: for each answer whether a limit ended it, so that its end token is not the target's.

    Returns: one row where the template shows every answer as it was generated, else further ones.

    Raises: UnusableConversation where an answer is lost, InputError where the template refuses the messages.
    """
    # 1. Each answer that counts, in the text that it was generated in.
    thinks = any(thought_of(message) for message in messages)
    chat = Chat(tokenizer, template, tools, thinks)
    shown = [_show_thoughts(message) for message in messages]
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    flags = cut if len(cut) == len(numbers) else [any(cut)] * len(numbers)
    answers, thoughtless = list[Answer](), 0
    for number, is_cut in zip(numbers, flags, strict=True):
        if messages[number].get("weight") == 0:
            continue
        answer = place_answer(chat, shown[: number + 1])
        if not answer.shows_thought(messages[number]):
            thoughtless += 1
        elif is_cut:
            answers.append(replace(answer, end=answer.words_end))
        else:
            answers.append(answer)

    # 2. Earlier answers share the row of a later one that shows them unchanged.
    rows = list[Row]()
    for answer in reversed(answers):
        begun = answer.text[: answer.end]
        row = next((row for row in rows if row.text.startswith(begun)), None)
        if row is None:
            rows.append(row := Row(answer.text, []))
        row.spans.insert(0, (answer.start, answer.end))
    return Placement(rows[::-1], thoughtless)


def place_answer(chat: Chat, messages: Messages) -> Answer:
    """The last message, an answer, in the text of all.

    Raises UnusableConversation where the template loses its words or calls, and InputError as `render`.
    """
    # 1. The texts with it and before it.
    before, message = messages[:-1], messages[-1]
    prompt, whole = chat.render(before, prompt=True), chat.render(messages)
    closing = _closing(chat, messages, whole)

    # 2. Where it starts. A thought that history never shows may stand in the content as it was generated.
    raw = _raw_thought(prompt, message["content"])
    if raw is not None and not holds(whole, thought_of(message)):
        text, start = prompt + raw + closing, len(prompt)
    else:
        text, start = _find_start(chat, messages, prompt, whole)

    # 3. Where it ends, with all its words between.
    words_end = max(start, len(text) - len(closing))
    answer = _find_end(chat, messages, Answer(text, start, len(text), words_end))
    calls = [*map(_spellings, _call_words(message.get("tool_calls") or ()))]
    if not all(any(word in answer.said for word in spellings) for spellings in calls):
        raise UnusableConversation("a tool call is lost in the chat template")
    if not holds(answer.said, words_of(message)):
        raise UnusableConversation("an answer is lost in the chat template")
    return answer


def words_of(message: Mapping[str, Any]) -> str:
    """The words of an answer without thoughts among them. Templates trim them."""
    return str(message["content"]).rpartition("</think>")[2].strip()


def holds(text: str, words: str) -> bool:
    """Whether the text holds these words. Some templates change the spaces between."""
    return " ".join(words.split()) in " ".join(text.split())


def _show_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under every name that templates read them from, and without its weight."""
    shown = {name: value for name, value in message.items() if name != "weight"}
    if any(message.get(name) for name in THOUGHTS):
        shown |= dict.fromkeys(THOUGHTS, thought_of(shown))
    return shown


def _raw_thought(prompt: str, content: str) -> str | None:
    """What the target wrote after a prompt that opens a thought; None where the content is no such text.

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
    # 1. The prompt is there as it was served.
    before, message = messages[:-1], messages[-1]
    opens = OPENED_THOUGHT.search(prompt) is not None
    served = whole.startswith(prompt) and not (opens and not thought_of(message))
    if served and chat.turns.asks:
        return whole, len(prompt)
    texts = [chat.render([*before, {"role": "assistant", "content": c}]) for c in (ANSWER, "one")]
    header = texts[0][: common_prefix(*texts)]  # that all answers without thoughts and calls begin with
    if served:
        begun = whole.startswith(header) and header[len(prompt) :].strip()
        return whole, len(header) if begun else len(prompt)

    # 2. History does not show how the prompt ends: an empty thought, or one that the template opens.
    silent = chat.render(before)
    if whole.startswith(silent) and whole.startswith(header):
        if prompt.startswith(header) and not opens:
            return prompt + whole[len(header) :], len(prompt)
        return whole, len(header)

    # 3. It shows earlier messages otherwise: gpt-oss' without the thoughts before calls once there is an answer.
    asking = prompt.removeprefix(silent)
    asked = header[: header.rfind(asking) + len(asking)]
    if not (prompt.startswith(silent) and asking.strip() and asking in header):
        raise UnusableConversation("an answer is lost in the chat template")
    if not whole.startswith(asked):
        raise UnusableConversation("an answer is lost in the chat template")
    return prompt + whole[len(asked) :], len(prompt)


def _closing(chat: Chat, messages: Messages, whole: str) -> str:
    """What the text has behind the words of the last message: calls, what ends the answer, and the rest.

    Digits after the words tell where these end. Raises UnusableConversation where the template loses words or calls.
    """
    # 1. Without the calls the text is another one.
    *before, message = messages
    calls_start = len(whole)
    if message.get("tool_calls"):
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        calls_start = common_prefix(whole, _rendered_or_nothing(chat, [*before, plain]))
        if calls_start == len(whole):
            raise UnusableConversation("the chat template shows no tool calls")

    # 2. The words.
    words = message["content"]
    if not words.strip():
        return whole[calls_start:]
    mark = "70"
    while mark in whole:
        mark += "70"[len(mark) % 2]
    marked = chat.render([*before, message | {"content": words + mark}])
    closing = marked.rpartition(mark)[2]
    if mark not in marked or not whole.endswith(closing):
        raise UnusableConversation("an answer is lost in the chat template")
    return closing


def _find_end(chat: Chat, messages: Messages, answer: Answer) -> Answer:
    """The answer with the token that ends it.

    A special token after its words does, and after calls the last one that stays when the conversation goes on.
    Where the template ends answers with none, the first token of the next turn does.
    """
    text, after, turns = answer.text, answer.words_end, chat.turns
    calls = bool(messages[-1].get("tool_calls"))
    if turns.closes:
        kept = common_prefix(text, _continued(chat, messages)) if calls else 0
        marks = [after + found.end() for found in re.finditer(turns.special, text[after:])]
        staying = [end for end in marks if end <= (kept or len(text))] or marks
        if staying:
            return replace(answer, end=staying[-1] if calls else staying[0])
    else:
        following, last = _continued(chat, messages) if calls else "", turns.next
        if following.startswith(text):
            begun = re.match(turns.special, following.removeprefix(text))
            last = begun[0] if begun else ""
        if last and (calls or not text[after:].strip()):
            return replace(answer, text=text + last, end=len(text) + len(last))
    return replace(answer, end=after + len(text[after:].rstrip(" ")))


def _continued(chat: Chat, messages: Messages) -> str:
    """The text of the messages with the next one; "" where the template refuses it."""
    following: dict[str, Any] = {"role": "user", "content": QUESTION}
    if calls := messages[-1].get("tool_calls"):
        first = calls[0] if isinstance(calls[0], dict) else {}
        following = TOOL_RESULT | {"tool_call_id": first.get("id") or CALL_ID}
    return _rendered_or_nothing(chat, [*messages, following])


def _rendered_or_nothing(chat: Chat, messages: Messages) -> str:
    """The text of the messages; "" where the template refuses them."""
    try:
        return chat.render(messages)
    except InputError:
        return ""


def _call_words(value: object) -> list[str]:
    """The names and the texts and numbers within the arguments of calls."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, str | int | float):
        return [str(value)]
    if isinstance(value, Mapping):
        parts = [part for name, part in value.items() if name not in ("id", "type")]
    else:
        parts = list(value) if isinstance(value, Sequence) else []
    return [word for part in parts for word in _call_words(part)]


def _spellings(word: str) -> list[str]:
    """The word as it is, and as JSON writes it."""
    return [word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1]]
