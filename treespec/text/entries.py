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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress, cycle
from typing import Any, NamedTuple

from treespec.errors import InputError
from treespec.text.strings import join_text_parts, require_well_formed

TURN_FIELDS = (
    "conversations",
    "messages",
    "conversation",
    "data",
)  # fields that hold a list of turns
TEXT_FIELD = "text"
TOKENS_FIELD = "input_ids"
MASK_FIELDS = ("loss_mask", "assistant_masks", "labels")  # which tokens of `input_ids` count
ROW_FIELDS = TURN_FIELDS + (TEXT_FIELD, TOKENS_FIELD)
ID_FIELDS = ("id", "conversation_id", "prompt_id", "question_id")
WITH_ROWS = (
    MASK_FIELDS + ID_FIELDS + ("attention_mask", "tools", "ended")
)  # further fields that are read


class UnusableConversation(InputError):
    """A conversation that cannot be trained on. Reports count its reason and show its detail."""

    def __init__(self, reason: str, detail: object = "") -> None:
        message = reason
        if detail:
            message += f": {detail}"
        super().__init__(message)
        self.reason = reason


ROLE_NAMES = {
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
OPENING_ROLES = ("system", "developer")  # roles that may only stand before the first question
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # fields of an answer's thoughts
EXTRA_FIELDS = {
    "assistant": REASONING_FIELDS,
    "tool": ("tool_call_id", "name"),
}  # fields for the template
IGNORED_LABEL = -100  # the label of a token that does not count

Message = dict[
    str, Any
]  # role and content, thoughts, tool_calls, weight, and what `EXTRA_FIELDS` names


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


def parse_conversation(where: str, raw: object, answered: bool = True) -> Conversation:
    """One entry of a source, in any of its forms, or a line's bytes. Raises UnusableConversation.

    answered: as for `treespec.text.conversations.read_conversations`.
    """
    # 1. The object, and its id.
    row = _parse_row(raw)
    source = _find_id(row, where)

    # 2. Its form. Tokens that tell which of them count are as somebody prepared the row: they come first.
    turns = _find_turns(row)
    if not answered:
        messages = parse_messages(turns, answered)
        if any(message["role"] == "tool" for message in messages):
            raise UnusableConversation("a tool answers in it")
        return Conversation(messages, where, source, _read_cuts(row), _read_tools(row))
    tokens = _find_tokens(row, turns)
    if tokens and not (turns and _is_nested(row)):
        return Conversation([], where, source, tokens=tokens)
    if turns is None and isinstance(row.get(TEXT_FIELD), str):
        return Conversation([], where, source, text=row[TEXT_FIELD])
    messages = parse_messages(turns, answered)
    return Conversation(messages, where, source, _read_cuts(row), _read_tools(row), tokens=tokens)


def _parse_row(raw: object) -> dict[str, Any]:
    """The fields of an entry, or of a line's bytes; {} for what is no object. Raises UnusableConversation."""
    row = raw
    if isinstance(raw, bytes):
        try:
            row = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise UnusableConversation("not valid JSON", error) from error
    if not isinstance(row, dict):
        return {}
    return row


def _find_id(row: dict[str, Any], where: str) -> str:
    """The id that a row gives itself, else its number in the file."""
    for name in ID_FIELDS:
        if isinstance(row.get(name), str | int):
            return str(row[name])
    return re.split("[: ]", where)[-1]


def _read_tools(row: dict[str, Any]) -> list[Any]:
    """The tools of a row. Raises UnusableConversation for what is no list."""
    tools = _parse_list(row.get("tools"))
    if not tools:
        return []
    if not isinstance(tools, list):
        raise UnusableConversation("its `tools` are no list")
    return tools


def _read_cuts(row: dict[str, Any]) -> tuple[bool, ...]:
    """For each answer whether a limit ended it, as `treespec regenerate` writes; () for an unknown end."""
    ends = row.get("ended")
    if not isinstance(ends, list):
        return ()
    return tuple(end == "max_new_tokens" for end in ends)


def _find_turns(row: dict[str, Any]) -> list[Any] | None:
    """The list of turns of a row; None if it has none."""
    for name in TURN_FIELDS:
        turns = _parse_list(row.get(name))
        if isinstance(turns, list):
            return turns
    return None


def _find_tokens(row: dict[str, Any], turns: list[Any] | None) -> tuple[TokenRow, ...]:
    """The token rows of a row. () if it has none, and for turns whose tokens come without a mask.

    Raises UnusableConversation for tokens that cannot be read.
    """
    if TOKENS_FIELD not in row:
        return ()
    for name in MASK_FIELDS:
        if isinstance(row.get(name), list):
            return _read_token_rows(row, name)
    if turns is not None:
        return ()
    raise UnusableConversation(
        f"`{TOKENS_FIELD}` without {', '.join(MASK_FIELDS[:-1])} or {MASK_FIELDS[-1]}"
    )


def _is_nested(row: dict[str, Any]) -> bool:
    """Whether a row of tokens holds a list an answer."""
    ids = row[TOKENS_FIELD]
    return _is_list_of_lists(ids) and len(ids) > 0


def _is_list_of_lists(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(part, list) for part in value)


def _read_token_rows(row: dict[str, Any], mask: str) -> tuple[TokenRow, ...]:
    """The token rows of a row. mask: the field that tells which tokens count. Raises UnusableConversation."""
    ids = row[TOKENS_FIELD]
    marks = row[mask]
    if not _is_nested(row):
        return (_read_token_row(ids, marks, row.get("attention_mask"), mask),)
    if len(ids) != len(marks) or not _is_list_of_lists(marks):
        raise UnusableConversation(f"`{TOKENS_FIELD}` and `{mask}` differ in length")
    rows = []
    for answer_ids, answer_marks in zip(ids, marks, strict=True):
        rows.append(_read_token_row(answer_ids, answer_marks, None, mask))
    return tuple(rows)


def _read_token_row(ids: Any, marks: list[Any], attention_mask: Any, mask: str) -> TokenRow:
    """Token ids without padding, and which of them count.

    Args:
        ids: what stands under `input_ids`.
        marks: of each token, whether it counts; of `labels`, the token itself or -100.
        attention_mask: 0 at padding; anything but a list for a row without padding.
        mask: the name of the field of `marks`.

    Raises: UnusableConversation for what is no token id, and for lists of different lengths.

        input_ids         1   9   5   7   0
        attention_mask    1   1   1   1   0     the last token is padding
        labels         -100 -100  5   7 -100
                     -> ids [1, 9, 5, 7], counts [False, False, True, True]
    """
    if not isinstance(attention_mask, list):
        attention_mask = [1] * len(marks)
    if not isinstance(ids, list) or not all(_is_token_id(value) for value in ids):
        raise UnusableConversation(f"`{TOKENS_FIELD}` holds something else than token ids")
    if not len(ids) == len(marks) == len(attention_mask):
        raise UnusableConversation(
            f"`{TOKENS_FIELD}`, `{mask}` and the attention mask differ in length"
        )
    if mask == "labels":
        counts = [mark != IGNORED_LABEL for mark in marks]
    else:
        counts = [bool(mark) for mark in marks]
    return TokenRow(list(compress(ids, attention_mask)), list(compress(counts, attention_mask)))


def _is_token_id(value: object) -> bool:
    """False for True, which is an int to Python."""
    return type(value) is int and value >= 0


def parse_messages(turns: object, answered: bool) -> list[Message]:
    """The messages of a list of turns. Raises UnusableConversation.

    Answers before the first question are dropped, as in FastChat and EAGLE. So is everything after
    the last answer where only `answered` questions are wanted.
    """
    # 1. Each turn. Answers before the first question, and an empty system turn, are dropped.
    system: list[Message] = []
    messages: list[Message] = []
    for number, message in enumerate(_iter_turns(turns), 1):
        if message["role"] in OPENING_ROLES and number == 1:
            if message["content"].strip():
                system.append(message)
        elif messages or message["role"] != "assistant":
            _check_due(messages, message, number)
            messages.append(message)

    # 2. Whole pairs of question and answer, if only answered questions count.
    while answered and messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages and answered:
        raise UnusableConversation("no assistant turn that answers a user turn")
    if not messages:
        raise UnusableConversation("no user turn")
    return system + messages


def _iter_turns(turns: object) -> Iterator[Message]:
    """The messages of a list of turns; UltraChat's has only texts. Raises UnusableConversation."""
    if not isinstance(turns, list):
        raise UnusableConversation("no list under `conversations` or `messages`")
    if all(isinstance(turn, str) for turn in turns):
        turns = _label_texts(turns)
    for number, turn in enumerate(turns, 1):
        yield _parse_message(turn, f"turn {number}")


def _label_texts(texts: list[str]) -> list[Message]:
    """Texts as messages, of user and assistant in turns."""
    roles = cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def _check_due(messages: list[Message], message: Message, number: int) -> None:
    """Raises UnusableConversation for a message that may not follow the others, or says nothing.

    messages: those before it, without the system's. number: of its turn.
    """
    role = message["role"]
    previous_role = None
    if messages:
        previous_role = messages[-1]["role"]
    if role not in MAY_FOLLOW[previous_role]:
        problem = "user and assistant do not alternate"
        raise UnusableConversation(problem, f"turn {number} is {role!r}")
    if role != "tool" and not message["content"].strip() and not message.get("tool_calls"):
        raise UnusableConversation("a turn is empty", f"turn {number}")


def get_reasoning(message: Mapping[str, Any]) -> str:
    """The thoughts before an answer: in a field of their own, or inside <think>; "" for none."""
    for name in REASONING_FIELDS:
        thought = message.get(name)
        if isinstance(thought, str) and thought.strip():
            return thought.strip()
    before, end, _ = message["content"].rpartition("</think>")
    if not end:
        return ""
    return before.rpartition("<think>")[2].strip()


def _parse_message(turn: Any, where: str) -> Message:
    """A turn as a message. Raises UnusableConversation."""
    # 1. Its role.
    if not isinstance(turn, dict):
        raise UnusableConversation("a turn is not an object", where)
    name = turn.get("role") or turn.get("from")
    role = ROLE_NAMES.get(str(name).lower())
    if role is None:
        raise UnusableConversation("a turn has an unknown role", f"{where}, {name!r}")

    # 2. Its text, and what else a template may show. An answer that only calls tools has no text.
    calls = _parse_list(turn.get("tool_calls"))
    message: Message = {"role": role, "content": _read_content(turn, bool(calls), where)}
    for name in EXTRA_FIELDS.get(role, ()):
        if turn.get(name):
            message[name] = turn[name]
    if role == "assistant":
        if isinstance(calls, list) and calls:
            message["tool_calls"] = [_parse_tool_call(call) for call in calls]
        if _has_no_weight(turn, where):
            message["weight"] = 0
    return message


def _read_content(turn: dict[str, Any], has_calls: bool, where: str) -> str:
    """The text of a turn. Raises UnusableConversation if it or its thoughts are no valid text."""
    content = turn.get("content")
    if content is None and "value" in turn:
        content = turn["value"]
    try:
        text = ""
        if content is not None or not has_calls:
            text = join_text_parts(content)
        require_well_formed(text, "which")
        for name in REASONING_FIELDS:
            thought = turn.get(name)
            if isinstance(thought, str):
                require_well_formed(thought, "which")
    except ValueError as error:
        problem = "the content of a turn is not text"
        raise UnusableConversation(problem, f"{where} {error}") from None
    return text


def _has_no_weight(turn: dict[str, Any], where: str) -> bool:
    """Whether an answer does not count: its `weight` is 0, as OpenAI's files for fine-tuning have it.

    Raises UnusableConversation for another weight than 0 and 1.
    """
    weight = turn.get("weight")
    if weight not in (None, 0, 1):
        raise UnusableConversation("a turn's weight is neither 0 nor 1", where)
    return weight == 0


def _parse_tool_call(call: Any) -> Any:
    """A tool call with arguments as fields: templates write them out, a text would be quoted."""
    try:
        function = call["function"]
        return call | {"function": function | {"arguments": json.loads(function["arguments"])}}
    except (KeyError, TypeError, ValueError, RecursionError):
        return call


def _parse_list(value: object) -> object:
    """The list that a JSON text holds, as tables without nested columns store it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value
