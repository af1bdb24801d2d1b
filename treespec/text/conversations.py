"""Conversations as rows of a file, a folder or a data set hold them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treespec.errors import InputError
from treespec.text.entries import (
    Message,
    cuts_of,
    form_of,
    messages_of,
    parsed,
    source_of,
    tokens_of,
    tools_of,
)
from treespec.text.forms import TEXT, TOKENS, UnusableConversation
from treespec.text.report import Report
from treespec.text.sources import entries

FORM = '{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}'


@dataclass(frozen=True)
class Conversation:
    """User and assistant alternate; the last turn is an assistant's. A system turn may come first.

    where: file and line. source: its id in the file, else its number there.
    cut: for each answer whether a limit ended it, so that its end token is not the target's.
    tools: JSON schemas of the functions that the assistant may call.
    text, tokens: in place of messages, a text that is formatted already, or token ids with a mask
    of those that count.
    """

    messages: list[Message]
    where: str = ""
    source: str = ""
    cut: tuple[bool, ...] = ()
    tools: list[Any] = field(default_factory=list)
    text: str | None = None
    tokens: tuple[list[int], list[bool]] | None = None


def read_conversations(
    source: str | Path, answered: bool = True
) -> tuple[list[Conversation], Report]:
    """Conversations of a file, a folder or a data set of the hub (`sources`, `forms`).

    answered: drop a last question without an answer; False keeps it, for the target to answer, and
    takes messages alone. Unusable ones are left out and counted. Raises InputError for a source
    that cannot be read or has no usable conversation.
    """
    found, report = [], Report()
    for where, raw in entries(source):
        try:
            found.append(conversation_of(where, raw, answered))
        except UnusableConversation as error:
            report.leave_out(where, error)
    report.used = len(found)
    refuse_unread(source, report)
    return found, report


def check_conversations(source: str | Path, answered: bool = True) -> None:
    """Raises InputError as `read_conversations`, but reads no further than to the first usable one."""
    report = Report()
    for where, raw in entries(source):
        try:
            conversation_of(where, raw, answered)
            return
        except UnusableConversation as error:
            report.leave_out(where, error)
    refuse_unread(source, report)


def conversation_of(where: str, raw: object, answered: bool = True) -> Conversation:
    """One entry of a source, in any of its forms. Raises UnusableConversation."""
    entry = parsed(raw)
    source, form = source_of(entry, where), form_of(entry)
    if answered and isinstance(entry, dict) and form == TEXT:
        return Conversation([], where, source, text=entry[TEXT])
    if answered and isinstance(entry, dict) and form == TOKENS:
        return Conversation([], where, source, tokens=tokens_of(entry))
    messages = messages_of(entry, answered)
    if not answered and any(message["role"] == "tool" for message in messages):
        raise UnusableConversation("a tool answers in it")
    return Conversation(messages, where, source, cuts_of(entry), tools_of(entry))


def refuse_unread(source: object, report: Report) -> None:
    """Raises InputError where reading found no usable conversation."""
    if report.used:
        return
    shown = "; ".join(report.problems[: len(report.left_out)]) or "the file is empty"
    no_json = "not valid JSON" in report.left_out
    form = f"; give one conversation a line, such as {FORM}" if no_json else ""
    raise InputError(f"no usable conversation in {source}: {shown}{form}")
