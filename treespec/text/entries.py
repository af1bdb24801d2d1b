"""Conversations as files hold them: a JSON value an entry, in ShareGPT's form or as messages."""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from treespec.errors import InputError
from treespec.text.archives import refuse_archive

ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
}


class UnusableConversation(InputError):
    """A conversation that cannot be trained on. Reports count its reason and show its detail."""

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def entries(path: Path) -> Iterator[tuple[str, object]]:
    """(file and line, the entry of a JSON list or the bytes of the line)."""
    try:
        with opened(path) as file:
            # 1. Refuse an archive.
            head = file.read(4096)
            refuse_archive(path, head)
            head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
            file.seek(0)

            # 2. A JSON list as a whole, or JSON line by line.
            if head.startswith(b"["):
                entries = json.loads(file.read())
                yield from ((f"{path.name} entry {i}", entry) for i, entry in enumerate(entries, 1))
            else:
                for i, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path.name}:{i}", line.removeprefix(b"\xef\xbb\xbf")
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path} is a damaged gzip archive: {error}; fetch it again") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; give a JSONL file") from error
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} begins as a JSON list but is not valid JSON: {error}") from error


def opened(path: Path) -> IO[bytes]:
    """A file to read, unpacked if it is a gzip archive."""
    file = path.open("rb")
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not packed:
        return file
    file.close()
    return cast(IO[bytes], gzip.open(path))


def parsed(entry: object) -> object:
    """The JSON value of an entry, which may be a line's bytes. Raises UnusableConversation."""
    if not isinstance(entry, bytes):
        return entry
    try:
        value: object = json.loads(entry)
    except (ValueError, RecursionError) as error:
        raise UnusableConversation("not valid JSON", error) from error
    return value


def source_of(entry: object, where: str) -> str:
    """The id that an entry gives itself, else its number in the file."""
    for name in ("id", "conversation_id", "prompt_id", "question_id"):
        value = entry.get(name) if isinstance(entry, dict) else None
        if isinstance(value, str | int):
            return str(value)
    return re.split("[: ]", where)[-1]


def cuts_of(entry: object) -> tuple[bool, ...]:
    """For each answer whether a limit ended it: what `treespec regenerate` writes as `ended`."""
    ended = entry.get("ended") if isinstance(entry, dict) else None
    return tuple(how == "max_new_tokens" for how in ended) if isinstance(ended, list) else ()


def messages_of(entry: object, answered: bool = True) -> list[dict[str, str]]:
    """The turns of one entry. Raises UnusableConversation.

    Answers before the first question are dropped, as in FastChat and EAGLE. So is a last question
    without an answer where only `answered` ones are wanted.
    """
    # 1. The list of turns.
    turns = entry.get("conversations", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise UnusableConversation("no list under `conversations` or `messages`")

    # 2. Each turn: its role, its content, and whether it is due.
    system: list[dict[str, str]] = []
    messages: list[dict[str, str]] = []
    for i, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise UnusableConversation("a turn is not an object", f"turn {i}")
        name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        role = ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            raise UnusableConversation("a turn has an unknown role", f"turn {i}, {name!r}")
        if not isinstance(content, str) or re.search("[\ud800-\udfff]", content):
            raise UnusableConversation("the content of a turn is not text", f"turn {i}")
        if role == "system" and i == 1:
            system = [{"role": role, "content": content}] if content.strip() else []
        elif messages or role != "assistant":
            if role != ("user", "assistant")[len(messages) % 2]:
                raise UnusableConversation(
                    "user and assistant do not alternate", f"turn {i} is {name!r}"
                )
            if not content.strip():
                raise UnusableConversation("a turn is empty", f"turn {i}")
            messages.append({"role": role, "content": content})

    # 3. Whole pairs of question and answer, if only answered questions count.
    if answered:
        messages = messages[: len(messages) // 2 * 2]
    if not messages:
        kind = "assistant turn that answers a " if answered else ""
        raise UnusableConversation(f"no {kind}user turn")
    return system + messages
