"""The forms of a row: which of its fields holds the conversation, and what stands beside it.

Four forms, here the same conversation:

    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"data": ["Hi", "Hello"]}                                              UltraChat's list
    {"text": "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n"}
    {"input_ids": [1, 4093, …], "loss_mask": [0, 0, …, 1, 1]}               tokens

`treespec regenerate` writes messages, and beside them `input_ids` and `loss_mask` as lists with a list an answer:
the prompt that the target answered, and its answer.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress, cycle
from typing import Any, NamedTuple

from treespec.errors import InputError
from treespec.text.strings import text_of, well_formed

TURNS = ("conversations", "messages", "conversation", "data")  # fields that hold a list of turns
TEXT = "text"
TOKENS = "input_ids"
MASKS = ("loss_mask", "assistant_masks", "labels")  # which tokens of `input_ids` count
FORMS = (*TURNS, TEXT, TOKENS)
IDS = ("id", "conversation_id", "prompt_id", "question_id")
WITH_ROWS = (*MASKS, *IDS, "attention_mask", "tools", "ended")  # further fields that are read


class UnusableConversation(InputError):
    """A conversation that cannot be trained on. Reports count its reason and show its detail."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


ROLES = {
    "system": "system",
    "developer": "developer",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "tool": "tool",
    "observation": "tool",
}
MAY_FOLLOW = {  # roles after a role; None is the beginning
    None: ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
OPENING_ROLES = ("system", "developer")  # roles that may stand before the first question alone
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # fields of an answer's thoughts
FURTHER = {"assistant": THOUGHTS, "tool": ("tool_call_id", "name")}  # fields for the template
IGNORED = -100  # the label of a token that does not count

Message = dict[str, Any]  # role and content, thoughts, tool_calls, weight, and what `FURTHER` names


class TokenRow(NamedTuple):
    """Token ids, and which of them count."""

    ids: list[int]
    counts: list[bool]


@dataclass(frozen=True)
class Conversation:
    """User and assistant alternate; the last turn is an assistant's. A system or developer turn may come first.

    where: file and line. source: its id in the file, else its number there.
    cut: for each answer whether a limit ended it, so that its end token is not the target's.
    tools: JSON schemas of the functions that the assistant may call.
    text: instead of messages, a text that is formatted already.
    tokens: instead of messages, rows of token ids with a mask of those that count; beside messages a row an
    answer, as its target generated it.
    """

    messages: list[Message]
    where: str = ""
    source: str = ""
    cut: tuple[bool, ...] = ()
    tools: list[Any] = field(default_factory=list)
    text: str | None = None
    tokens: tuple[TokenRow, ...] = ()


def conversation_of(where: str, raw: object, answered: bool = True) -> Conversation:
    """One entry of a source, in any of its forms, or a line's bytes. Raises UnusableConversation.

    answered: as for `treespec.text.conversations.read_conversations`.
    """
    # 1. The object, and the id that it gives itself, else its number in the file.
    try:
        row: Any = json.loads(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as error:
        raise UnusableConversation("not valid JSON", error) from error
    row = row if isinstance(row, dict) else {}
    ids = (str(row[name]) for name in IDS if isinstance(row.get(name), str | int))
    source = next(ids, re.split("[: ]", where)[-1])

    # 2. Its form. Tokens that tell which of them count are as somebody prepared the row: they come first.
    turns = _find_turns(row)
    tokens = _find_tokens(row, turns) if answered else ()
    if tokens and not (turns and _is_nested(row)):
        return Conversation([], where, source, tokens=tokens)
    if answered and turns is None and isinstance(row.get(TEXT), str):
        return Conversation([], where, source, text=row[TEXT])

    # 3. Messages, the answers that a limit ended (as `treespec regenerate` writes), and tools.
    messages = messages_of(turns, answered)
    if not answered and any(message["role"] == "tool" for message in messages):
        raise UnusableConversation("a tool answers in it")
    tools = _listed(row.get("tools")) or []
    if not isinstance(tools, list):
        raise UnusableConversation("its `tools` are no list")
    ended = row.get("ended")
    cut = [how == "max_new_tokens" for how in ended] if isinstance(ended, list) else []
    return Conversation(messages, where, source, tuple(cut), tools, tokens=tokens)


def _find_turns(row: dict[str, Any]) -> list[Any] | None:
    """The list of turns of a row; None where it has none."""
    for name in TURNS:
        turns = _listed(row.get(name))
        if isinstance(turns, list):
            return turns
    return None


def _find_tokens(row: dict[str, Any], turns: list[Any] | None) -> tuple[TokenRow, ...]:
    """The token rows of a row. () where it has none, and for turns with tokens that do not tell which of them count.

    Raises UnusableConversation for tokens that cannot be read.
    """
    mask = next((name for name in MASKS if isinstance(row.get(name), list)), None)
    if TOKENS not in row or (mask is None and turns is not None):
        return ()
    return _read_token_rows(row, mask)


def _is_nested(row: dict[str, Any]) -> bool:
    """Whether a row of tokens holds a list an answer."""
    ids = row[TOKENS]
    return isinstance(ids, list) and bool(ids) and all(isinstance(one, list) for one in ids)


def _read_token_rows(row: dict[str, Any], mask: str | None) -> tuple[TokenRow, ...]:
    """The token rows of a row. mask: the field that tells which tokens count.

    Raises UnusableConversation for a row that does not tell which tokens count.
    """
    if mask is None:
        raise UnusableConversation(f"`{TOKENS}` without {', '.join(MASKS[:-1])} or {MASKS[-1]}")
    if not _is_nested(row):
        return (_read_token_row(row[TOKENS], row[mask], row.get("attention_mask"), mask),)
    ids = row[TOKENS]
    marks = row[mask]
    if len(ids) != len(marks) or not all(isinstance(one, list) for one in marks):
        raise UnusableConversation(f"`{TOKENS}` and `{mask}` differ in length")
    return tuple(_read_token_row(*pair, None, mask) for pair in zip(ids, marks, strict=True))


def _read_token_row(ids: Any, marks: list[Any], seen: Any, mask: str) -> TokenRow:
    """Token ids without padding, and which of them count. Raises UnusableConversation.

    seen: an attention mask, or anything else for none. mask: the name of the field of `marks`.
    """
    seen = seen if isinstance(seen, list) else [1] * len(marks)
    if not isinstance(ids, list) or not all(type(value) is int and value >= 0 for value in ids):
        raise UnusableConversation(f"`{TOKENS}` holds something else than token ids")
    if not len(ids) == len(marks) == len(seen):
        raise UnusableConversation(f"`{TOKENS}`, `{mask}` and the attention mask differ in length")
    counts = [mark != IGNORED if mask == "labels" else bool(mark) for mark in marks]
    return TokenRow(list(compress(ids, seen)), list(compress(counts, seen)))


def messages_of(turns: object, answered: bool) -> list[Message]:
    """The messages of a list of turns. Raises UnusableConversation.

    Answers before the first question are dropped, as in FastChat and EAGLE. So is everything after
    the last answer where only `answered` questions are wanted.
    """
    # 1. The list of turns; UltraChat's has texts alone.
    if not isinstance(turns, list):
        raise UnusableConversation("no list under `conversations` or `messages`")
    if all(isinstance(turn, str) for turn in turns):
        roles = cycle(("user", "assistant"))
        turns = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]

    # 2. Each turn: its role, its content, and whether it is due.
    system: list[Message] = []
    messages: list[Message] = []
    for i, turn in enumerate(turns, 1):
        message = _message(turn, f"turn {i}")
        role = message["role"]
        said = message["content"].strip()
        if role in OPENING_ROLES and i == 1:
            system = [message] if said else []
        elif messages or role != "assistant":
            if role not in MAY_FOLLOW[messages[-1]["role"] if messages else None]:
                problem = "user and assistant do not alternate"
                raise UnusableConversation(problem, f"turn {i} is {role!r}")
            if not (said or message.get("tool_calls") or role == "tool"):
                raise UnusableConversation("a turn is empty", f"turn {i}")
            messages.append(message)

    # 3. Whole pairs of question and answer, if only answered questions count.
    while answered and messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        kind = "assistant turn that answers a " if answered else ""
        raise UnusableConversation(f"no {kind}user turn")
    return system + messages


def thought_of(message: Mapping[str, Any]) -> str:
    """The thoughts before an answer: in a field of their own, or inside <think>; "" for none."""
    for name in THOUGHTS:
        if isinstance(thought := message.get(name), str) and thought.strip():
            return thought.strip()
    before, end, _ = message["content"].rpartition("</think>")
    return before.rpartition("<think>")[2].strip() if end else ""


def _message(turn: Any, where: str) -> Message:
    """A turn as a message. Raises UnusableConversation."""
    # 1. Its role.
    if not isinstance(turn, dict):
        raise UnusableConversation("a turn is not an object", where)
    name = turn.get("role") or turn.get("from")
    role = ROLES.get(str(name).lower())
    if role is None:
        raise UnusableConversation("a turn has an unknown role", f"{where}, {name!r}")

    # 2. Its text, and what else a template may show. An answer that only calls tools has no text.
    calls = _listed(turn.get("tool_calls")) or []
    message: Message = {"role": role, "content": _read_content(turn, bool(calls), where)}
    message |= {name: turn[name] for name in FURTHER.get(role, ()) if turn.get(name)}
    if role == "assistant":
        if isinstance(calls, list) and calls:
            message["tool_calls"] = [_call(call) for call in calls]
        message |= _read_weight(turn, where)
    return message


def _read_content(turn: dict[str, Any], has_calls: bool, where: str) -> str:
    """The text of a turn. Raises UnusableConversation where it or its thoughts are none."""
    content = turn.get("content")
    if content is None and "value" in turn:
        content = turn["value"]
    try:
        text = "" if content is None and has_calls else text_of(content)
        for words in (text, *map(turn.get, THOUGHTS)):
            well_formed(words if isinstance(words, str) else "", "which")
    except ValueError as error:
        problem = "the content of a turn is not text"
        raise UnusableConversation(problem, f"{where} {error}") from None
    return text


def _read_weight(turn: dict[str, Any], where: str) -> Message:
    """The field `weight` of an answer that does not count, as OpenAI's files for fine-tuning have it, else none.

    Raises UnusableConversation for another weight than 0 and 1.
    """
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise UnusableConversation("a turn's weight is neither 0 nor 1", where)
    return {"weight": 0} if weight == 0 else {}


def _call(call: Any) -> Any:
    """A tool call with arguments as fields: templates write them out, a text would be quoted."""
    try:
        function = call["function"]
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except (KeyError, TypeError, ValueError, RecursionError):
        return call


def _listed(value: object) -> object:
    """The list that a JSON text holds, as tables without nested columns store it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
