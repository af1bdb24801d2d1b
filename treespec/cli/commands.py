"""The slash commands of a conversation."""

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from treespec.cli.conversation import Conversation, Message
from treespec.decoding.stats import figures_of
from treespec.errors import InputError
from treespec.options import SEEDS
from treespec.text.conversations import read_conversations
from treespec.text.strings import one_line
from treespec.trees.policy import FORMS
from treespec.verify.facts import NAMES


@final
@dataclass(frozen=True)
class Question:
    """A message for the target to answer again, in place of the last answer."""

    text: str


@final
@dataclass(frozen=True)
class Command:
    """run: (conversation, value) -> text to show, or a question to answer.

    value: placeholder in the help, "" for a command without a value. choices: for completion.
    """

    run: Callable[[Conversation, str], str | Question]
    help: str
    value: str = ""
    choices: tuple[str, ...] = ()


def run(conversation: Conversation, line: str) -> str | Question:
    """Run a line such as `/temperature 0.7`. The first letters of a command are enough.

    Returns text to show or a question to answer. Raises InputError for a line that cannot be run,
    and EOFError at the end of the conversation.
    """
    name, value = [*line.strip().split(maxsplit=1), ""][:2]
    names = [name] if name in COMMANDS else [known for known in COMMANDS if known.startswith(name)]
    if len(names) != 1:
        close = names or difflib.get_close_matches(name, COMMANDS)
        hint = f"did you mean {' or '.join(close)}?" if close else "/help lists the commands"
        raise InputError(f"unknown command {name}: {hint}")
    command = COMMANDS[names[0]]
    if value and not command.value:
        raise InputError(f"{names[0]} takes no value")
    return command.run(conversation, value)


def reset(conversation: Conversation, _: str) -> str:
    conversation.reset()
    return "a new conversation"


def retry(conversation: Conversation, _: str) -> Question:
    return Question(conversation.last_message)


def change(conversation: Conversation, **options: Any) -> None:
    """Other options from the next answer on. Raises InputError for a value out of range."""
    conversation.change(replace(conversation.config, **options))


def temperature(conversation: Conversation, value: str) -> str:
    if value:
        change(conversation, temperature=decimal("/temperature", value, "0.7"))
    return f"temperature {conversation.config.temperature:g}"


def top_p(conversation: Conversation, value: str) -> str:
    if value:
        change(conversation, top_p=decimal("/top-p", value, "0.9"))
    return f"top-p {conversation.config.top_p:g}"


def max_tokens(conversation: Conversation, value: str) -> str:
    if value:
        change(conversation, max_new_tokens=whole("/max-tokens", value, least=1, example="512"))
    return f"at most {conversation.config.max_new_tokens} tokens an answer"


def seed(conversation: Conversation, value: str) -> str:
    if value:
        drawn_anew = value == "none"
        number = None if drawn_anew else whole("/seed", value, 0, example="7 or /seed none")
        change(conversation, seed=number)
    chosen = conversation.config.seed
    return "no seed: every answer is drawn anew" if chosen is None else f"seed {chosen}"


def system(conversation: Conversation, value: str) -> str:
    if value:
        change(conversation, system=None if value == "none" else value)
    chosen = conversation.config.system
    return f"system message: {chosen}" if chosen else "no system message"


def decimal(command: str, value: str, example: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"{command[1:]} {value!r} is not a number: {command} {example}") from None


def whole(command: str, value: str, least: int, example: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", value) or not least <= int(value) <= SEEDS:
        raise InputError(
            f"{command[1:]} {value!r} is not a whole number from {least}: {command} {example}"
        )
    return int(value)


def verifier(conversation: Conversation, value: str) -> str:
    if value:
        return conversation.configure(conversation.config.tree, value)
    return f"{conversation.drafting()}; there are {', '.join(NAMES)}"


def tree(conversation: Conversation, value: str) -> str:
    if value:
        chosen = None if value == "default" else value
        return conversation.configure(chosen, conversation.config.verifier)
    return f"{conversation.drafting()}; there are default, {FORMS}"


def stats(conversation: Conversation, _: str) -> str:
    total, answers = conversation.total, conversation.answers
    if not total.cycles:
        raise InputError("nothing has been answered yet")

    # 1. The stages' shares of the time.
    seconds, shares = total.seconds["total"], []
    for stage in ("prefill", "draft", "target", "verify", "commit"):
        share = f"{stage} {total.seconds[stage] / seconds:.0%}"
        if stage == "draft":
            share += f" (head {total.seconds['head'] / seconds:.0%})"
        shares.append(share)

    # 2. The lines.
    rates = " ".join(f"{rate:.2f}" for rate in total.acceptance_by_depth)
    count = f"{answers} {'answer' if answers == 1 else 'answers'}"
    lines = [
        f"{count} · {figures_of(total, explain=True)} · {total.cycles} cycles",
        f"α by depth (accepted, of what was reached): {rates or 'nothing drafted'}",
        f"time: {seconds:.1f} s, of it {', '.join(shares)}",
    ]
    return "\n".join(lines)


def save(conversation: Conversation, value: str) -> str:
    """Append the conversation as a line of JSON, which `treespec train --data` reads."""
    # 1. What to append, and where.
    if not value:
        raise InputError("where to? /save FILE")
    if not conversation.messages:
        raise InputError("nothing has been said yet")
    messages = conversation.opening + conversation.messages
    path = Path(value).expanduser().resolve()

    # 2. Write the longer file beside the old one, then rename it.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file")
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        line = json.dumps({"messages": messages}, ensure_ascii=False)
        temporary.write_bytes(before + line.encode() + b"\n")
        if before:
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot save to {path}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return f"saved to {path}"


def load(conversation: Conversation, value: str) -> str:
    """Go on with the last conversation of a file, such as `/save` writes."""
    if not value:
        raise InputError("from where? /load FILE")
    path = Path(value).expanduser()
    if not path.is_file():
        raise InputError(f"no file at {path}")
    messages = read_conversations(path)[0][-1].messages
    if not messages or any(message["role"] == "tool" for message in messages):
        raise InputError(f"the last conversation in {path} is not of user and assistant alone")
    conversation.resume([Message(role=m["role"], content=m["content"]) for m in messages])
    return f"goes on after: {one_line(conversation.last_message)}"


def undo(conversation: Conversation, _: str) -> str:
    forgotten = conversation.last_message
    conversation.undo()
    return f"forgotten: {one_line(forgotten)}"


def colour(conversation: Conversation, _: str) -> str:
    conversation.colour = not conversation.colour
    return f"drafted tokens {'are marked' if conversation.colour else 'look like all others'}"


def show_help(_: Conversation, __: str) -> str:
    usage = {f"{name} {command.value}": command.help for name, command in COMMANDS.items()}
    lines = [f"{line:<18} {text}" for line, text in usage.items()]
    keys = "Alt-Enter breaks a line, Ctrl-C stops an answer, Ctrl-D quits. //x sends /x."
    return "\n".join([*lines, keys])


def leave(_: Conversation, __: str) -> str:
    raise EOFError


COMMANDS = {
    "/reset": Command(reset, "forget what was said"),
    "/undo": Command(undo, "forget the last message and its answer"),
    "/retry": Command(retry, "answer the last message again"),
    "/system": Command(system, "the system message; none removes it", "TEXT", ("none",)),
    "/temperature": Command(temperature, "0 is greedy", "X", ("0", "0.6", "1")),
    "/top-p": Command(
        top_p,
        "sample from the likeliest tokens that hold this probability; 1 is off",
        "X",
        ("0.9", "1"),
    ),
    "/max-tokens": Command(max_tokens, "most tokens of an answer", "N", ("128", "512", "2048")),
    "/seed": Command(
        seed,
        "the same seed and messages give the same answers; none: a new seed each time",
        "N",
        ("none", "0"),
    ),
    "/verifier": Command(verifier, "how drafted tokens are verified", "NAME", NAMES),
    "/tree": Command(
        tree,
        "shape of the drafted tree",
        "SPEC",
        ("default", "dynamic", "sampled", "eagle", "chain:5", "2x4"),
    ),
    "/stats": Command(stats, "acceptance and time of the conversation"),
    "/save": Command(save, "append the conversation as a line of JSON", "FILE"),
    "/load": Command(load, "go on with the last conversation of such a file", "FILE"),
    "/colour": Command(colour, "mark drafted tokens, or do not"),
    "/help": Command(show_help, "this list"),
    "/quit": Command(leave, "end"),
}


def in_words(error: Exception) -> str:
    """An error's line, naming slash commands in place of command-line options."""
    named = re.sub(r"--max-new-tokens|max_new_tokens", "/max-tokens", str(error))
    return re.sub(r"--(?=(tree|verifier|temperature|top-p|seed|system)\b)", "/", named)
