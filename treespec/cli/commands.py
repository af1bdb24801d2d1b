"""The slash commands of a conversation: what was said, and the options of the next answer."""

import difflib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

from treespec.cli.config import ChatConfig
from treespec.cli.conversation import Conversation, Message
from treespec.cli.options import WORDS
from treespec.decoding.stats import figures_of
from treespec.errors import InputError
from treespec.files.atomic import writing
from treespec.text.conversations import read_conversations
from treespec.text.strings import one_line
from treespec.trees.policy import FORMS
from treespec.verify.facts import NAMES

SETTINGS = {  # options that a command of their name sets, and values to complete
    "system": ("none",),
    "temperature": ("0", "0.6", "1"),
    "top_k": ("0", "50"),
    "top_p": ("0.9", "1"),
    "min_p": ("0", "0.1"),
    "repetition_penalty": ("1", "1.1"),
    "presence_penalty": ("0", "1"),
    "frequency_penalty": ("0", "1"),
    "max_new_tokens": ("128", "512", "2048"),
    "seed": ("none", "0"),
}


@final
@dataclass(frozen=True)
class Question:
    """A message for the target to answer again, instead of the last answer."""

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


def setting(name: str) -> Command:
    """The command that shows and sets an option."""
    (known,) = (known for known in fields(ChatConfig) if known.name == name)
    called, choices = name.replace("_", "-"), SETTINGS[name]
    kind: Any = next((k for k in (int, float) if known.type in (k, k | None)), str)

    def run(conversation: Conversation, value: str) -> str:
        try:
            chosen = None if value == "none" and known.default is None else kind(value or 0)
        except ValueError:
            example = f"/{called} {choices[-1]}"
            raise InputError(f"{called} {value!r} is not {WORDS[kind]}: {example}") from None
        if value:
            conversation.change(**{name: chosen})
        now = getattr(conversation.config, name)
        return f"{called} {now:g}" if isinstance(now, float) else f"{called} {now or 'none'}"

    return Command(run, known.metadata["help"], "TEXT" if kind is str else "N", choices)


def reset(conversation: Conversation, _: str) -> str:
    conversation.reset()
    return "a new conversation"


def retry(conversation: Conversation, _: str) -> Question:
    return Question(conversation.last_message)


def undo(conversation: Conversation, _: str) -> str:
    forgotten = conversation.last_message
    conversation.undo()
    return f"forgotten: {one_line(forgotten)}"


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
    whole = total.seconds["total"]
    share = {stage: f"{seconds / whole:.0%}" for stage, seconds in total.seconds.items()}
    stages = ("prefill", "draft", "target", "verify", "commit")
    shares = ", ".join(f"{stage} {share[stage]}" for stage in stages)
    shares = shares.replace(", target", f" (head {share['head']}), target")
    rates = " ".join(f"{rate:.2f}" for rate in total.acceptance_by_depth)
    return (
        f"{answers} {'answer' if answers == 1 else 'answers'} · {figures_of(total, explain=True)} · "
        f"{total.cycles} cycles\n"
        f"α by depth (accepted, of what was reached): {rates or 'nothing drafted'}\n"
        f"time: {whole:.1f} s, of it {shares}"
    )


def save(conversation: Conversation, value: str) -> str:
    """Append the conversation as a line of JSON, which `treespec train --data` reads."""
    if not value:
        raise InputError("where to? /save FILE")
    if not conversation.messages:
        raise InputError("nothing has been said yet")
    path = Path(value).expanduser().resolve()
    line = json.dumps(
        {"messages": conversation.opening + conversation.messages}, ensure_ascii=False
    )
    with writing(path) as temporary:
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        temporary.write_bytes(before + line.encode() + b"\n")
        if before:
            shutil.copymode(path, temporary)
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


def colour(conversation: Conversation, _: str) -> str:
    conversation.colour = not conversation.colour
    return f"drafted tokens {'are marked' if conversation.colour else 'look like all others'}"


def show_help(_: Conversation, __: str) -> str:
    usage = {f"{name} {command.value}": command.help for name, command in COMMANDS.items()}
    lines = [f"{line:<22} {text}" for line, text in usage.items()]
    keys = "Alt-Enter breaks a line, Ctrl-C stops an answer, Ctrl-D quits. //x sends /x."
    return "\n".join([*lines, keys])


def leave(_: Conversation, __: str) -> str:
    raise EOFError


TREES = ("default", "dynamic", "sampled", "eagle", "chain:5", "2x4")
COMMANDS = {
    "/reset": Command(reset, "forget what was said"),
    "/undo": Command(undo, "forget the last message and its answer"),
    "/retry": Command(retry, "answer the last message again"),
    **{f"/{name.replace('_', '-')}": setting(name) for name in SETTINGS},
    "/verifier": Command(verifier, "how drafted tokens are verified", "NAME", NAMES),
    "/tree": Command(tree, "shape of the drafted tree", "SPEC", TREES),
    "/stats": Command(stats, "acceptance and time of the conversation"),
    "/save": Command(save, "append the conversation as a line of JSON", "FILE"),
    "/load": Command(load, "go on with the last conversation of such a file", "FILE"),
    "/colour": Command(colour, "mark drafted tokens, or do not"),
    "/help": Command(show_help, "this list"),
    "/quit": Command(leave, "end"),
}


def in_words(error: Exception) -> str:
    """An error's line, naming slash commands instead of command-line options."""
    return re.sub(rf"--(?=({'|'.join(COMMANDS).replace('/', '')})\b)", "/", str(error))
