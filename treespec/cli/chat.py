"""`treespec chat`: a conversation in the terminal, or one message a line through a pipe."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from textwrap import wrap
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, final

import typer

from treespec.cli.answer import AnswerConfig, load_spec
from treespec.cli.early import begin_answers
from treespec.cli.early_requests import check_request
from treespec.cli.endings import end_answers, explain_cut, explain_no_gain, print_ending
from treespec.cli.options import build_command
from treespec.cli.terminal import build_prompt_reader
from treespec.cli.wrapping import WordWrapper, find_terminal_width
from treespec.engine.stats import Stats, format_stats
from treespec.engine.synonyms import find_synonym
from treespec.errors import InputError, describe_os_error, is_input_error
from treespec.files.printable import to_one_line, to_printable
from treespec.options import find_nearest_name, option

if TYPE_CHECKING:
    from treespec.api.spec import Spec
    from treespec.engine.output import Stream

CHAT_HINTS = "Alt-Enter begins a new line, Ctrl-C stops an answer, Ctrl-D ends the chat"  # keys of a terminal
# other chats' names of commands -> ours
CHAT_ALIASES = {
    "/exit": "/quit",
    "/bye": "/quit",
    "/clear": "/reset",
    "/new": "/reset",
    "/?": "/help",
}
HELP_INDENT = 23  # columns of a command and its value in /help
SETTABLE_OPTIONS = (  # options that a slash command of the same name sets
    "system",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_new_tokens",
    "seed",
    "tree",
    "verifier",
)


@dataclass(frozen=True, kw_only=True)
class ChatConfig(AnswerConfig):
    system: str | None = option("system message", None)


@build_command(ChatConfig)
def chat(config: ChatConfig) -> None:
    """Chat with a model; drafted tokens are green, or underlined under NO_COLOR. /help: commands.

    Through a pipe every line is a message. Answers go to standard output, figures to standard error.
    """
    # 1. Check what needs no weights, load, and render one prompt, so that a missing template shows now.
    begin_answers(config)
    check_request(config)
    conversation = ChatSession(load_spec(config), config)
    conversation.spec.request(conversation.opening + [build_message("user", "Hello")])

    # 2. Messages and slash commands, until the input ends.
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read_line: Callable[[], str] = input
    if is_terminal:
        read_line = build_prompt_reader([*CHAT_COMMANDS, *CHAT_ALIASES])
        note(f"{describe_chat(conversation.spec)}\n/help lists the commands. {CHAT_HINTS}.")
    while True:
        try:
            run_line(conversation, read_line())
        except EOFError:
            conversation.end()
            break
        except KeyboardInterrupt:  # on a terminal Ctrl-C ends only the line or the answer
            if not is_terminal:
                raise
        except Exception as error:
            if not is_input_error(error):
                raise
            note(f"treespec: {error}")


def describe_chat(spec: "Spec") -> str:
    """Say who answers and what drafts, in a sentence each."""
    dtype = str(spec.target.dtype).removeprefix("torch.")
    answers = f"You are chatting with {spec.name}, in {dtype} on {spec.target.device}."
    sentence = spec.drafting_sentence
    return f"{answers} {sentence[0].upper()}{sentence[1:]}."


def run_line(conversation: "ChatSession", line: str) -> None:
    """Run a line of input: a slash command, or a message to answer. //x is the message /x."""
    if line.startswith("/") and not line.startswith("//"):
        note(run_chat(conversation, line))
    elif line.strip():
        conversation.show_answer(line.removeprefix("/").strip())


def note(text: str) -> None:
    """Print a text dimmed, on standard error, since it is no part of an answer."""
    if text:
        typer.secho(to_printable(text), dim=True, err=True)


def build_message(role: str, content: str) -> dict[str, str]:
    """A message as chat templates take it."""
    return {"role": role, "content": content}


@final
@dataclass
class ChatSession:
    """A conversation, and the settings that answer it.

    Attributes:
        spec: decodes the answers.
        config: the settings, which slash commands change.
        messages: the questions and answers so far, without the system message.
        total: summed figures of all answers, replaced ones included.
        warned: whether it has said that the head's drafts do not pay.
    """

    spec: "Spec"
    config: ChatConfig
    messages: list[dict[str, str]] = field(default_factory=list)
    total: Stats = field(default_factory=Stats)
    warned: bool = False

    @property
    def opening(self) -> list[dict[str, str]]:
        """A list of the system message; [] without one."""
        if not self.config.system:
            return []
        return [build_message("system", self.config.system)]

    @property
    def last_message(self) -> str:
        """The last message of the user. Raises InputError if nothing has been asked."""
        if not self.messages:
            raise InputError("there is no message yet")
        return self.messages[-2]["content"]

    def show_answer(self, text: str, again: bool = False) -> None:
        """Print an answer as it arrives, then its figures, and keep the turn.

        After Ctrl-C it keeps the answer so far, and raises KeyboardInterrupt.

        Args:
            text: the user's message.
            again: True replaces the last turn. Default: False.
        """
        # 1. Show the answer.
        history = self.messages
        if again:
            history = self.messages[:-2]
        messages = history + [build_message("user", text)]
        stream = self.spec.stream(self.opening + messages, **self.config.requested)
        interrupted = show_stream(stream)

        # 2. Keep the turn, unless the answer is empty, which templates cannot show.
        stats = stream.stats
        reply = stream.output.text.strip()
        self.total.add(stats)
        if reply:
            self.messages = messages + [build_message("assistant", reply)]
        notes = [
            format_stats(stats, explain=self.total.cycles == stats.cycles),
            f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused",
        ]
        if interrupted:
            notes.append("interrupted")
        if not reply:
            notes.append("the answer is empty: the turn is dropped")
        if stats.truncated:
            notes.append(explain_cut(stats, self.config.max_new_tokens))
        note(" · ".join(notes) + "\n")
        self.warn_if_unprofitable()
        if interrupted:
            raise KeyboardInterrupt

    def warn_if_unprofitable(self) -> None:
        """Say once that the drafts of a head do not pay in this conversation."""
        warning = explain_no_gain(self.total)
        if self.spec.head and warning and not self.warned:
            self.warned = True
            note(f"{warning}: treespec doctor looks for the reason\n")

    def end(self) -> None:
        """Print the ending of the conversation, if anything was answered."""
        total = self.total
        if total.cycles:
            figures = format_stats(total, explain=True)
            print_ending(end_answers(self.config, figures, total.new_tokens, total.cycles))


def show_stream(stream: "Stream") -> bool:
    """Print an answer as it arrives, with accepted drafts in green. Returns whether Ctrl-C stopped it.

    The first Ctrl-C stops after the present cycle, the second one at once.
    """
    draft_style: dict[str, Any] = {"fg": "green"}
    if os.environ.get("NO_COLOR"):
        draft_style = {"underline": True}
    stopped = Event()

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stopped.set()

    wrapper = WordWrapper(find_terminal_width())
    signal.signal(signal.SIGINT, stop)
    try:
        for piece in stream:
            style: dict[str, Any] = {}
            if piece.drafted:
                style = draft_style
            wrapper.add(to_printable(piece.text), style)
            if stopped.is_set():
                break
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        wrapper.finish()
        typer.echo()
    return stopped.is_set()


class ChatCommand(NamedTuple):
    """A slash command.

    Attributes:
        run: (conversation, value) -> text to show.
        help: the command's line in /help.
        value: placeholder of the value in the help; "" for a command without a value.
    """

    run: Callable[[ChatSession, str], str]
    help: str
    value: str = ""


def run_chat(conversation: ChatSession, line: str) -> str:
    """Run a slash command such as `/temperature 0.7`, and return the text to show.

    Raises:
        InputError, TreeError: for a command that cannot be run; nothing is changed then.
        EOFError: at the end of the conversation.
    """
    name, _, value = line.strip().partition(" ")
    name = CHAT_ALIASES.get(name, name)
    setting = find_synonym(name.removeprefix("/"), SETTABLE_OPTIONS)
    if setting is not None:
        name = f"/{setting.replace('_', '-')}"
    if name not in CHAT_COMMANDS:
        raise InputError(
            f"unknown command {name}{find_nearest_name(name, CHAT_COMMANDS)}: /help lists them"
        )
    if value and not CHAT_COMMANDS[name].value:
        raise InputError(f"{name} takes no value")
    return CHAT_COMMANDS[name].run(conversation, value.strip())


def build_setting_command(name: str) -> ChatCommand:
    """Build the slash command that shows and sets an option of `ChatConfig`."""
    field_by_name = {option_field.name: option_field for option_field in fields(ChatConfig)}
    option_field = field_by_name[name]
    kind: Any = str
    if option_field.type in (int, int | None):
        kind = int
    elif option_field.type in (float, float | None):
        kind = float

    def run(conversation: ChatSession, value: str) -> str:
        if value:
            new_value: Any = value
            with suppress(ValueError):  # checking the option raises a better error
                new_value = kind(value)
            if value == "none" and option_field.default is None:
                new_value = None
            change_setting(conversation, name, new_value)
        if name in ("tree", "verifier"):
            return ", ".join(conversation.spec.drafting_names)
        current = getattr(conversation.config, name)
        if current is None:
            current = "none"
        return f"{name.replace('_', '-')} {current}"

    placeholder = "N"
    if kind is str:
        placeholder = "TEXT"
    return ChatCommand(run, option_field.metadata["help"], placeholder)


def change_setting(conversation: ChatSession, name: str, value: object) -> None:
    """Set an option. Raises InputError or TreeError for an invalid value; nothing is changed then."""
    changes: Any = {name: value}
    config = replace(conversation.config, **changes)
    if name in ("tree", "verifier"):
        conversation.spec = conversation.spec.configured(
            config.tree, config.verifier, config.allow_lossy
        )
    conversation.config = config


def reset(conversation: ChatSession, _: str) -> str:
    """Run /reset."""
    conversation.messages = []
    conversation.total = Stats()
    return "a new conversation"


def remove_last_turn(conversation: ChatSession, _: str) -> str:
    """Run /undo."""
    message = conversation.last_message
    conversation.messages = conversation.messages[:-2]
    return f"removed: {to_one_line(message)}"


def retry(conversation: ChatSession, _: str) -> str:
    """Run /retry."""
    conversation.show_answer(conversation.last_message, again=True)
    return ""


def show_stats(conversation: ChatSession, _: str) -> str:
    """Run /stats."""
    total = conversation.total
    rates = [f"{rate:.2f}" for rate in total.acceptance_by_depth] or ["-"]
    return f"{format_stats(total, explain=True)} · α by depth {' '.join(rates)}"


def save_chat(conversation: ChatSession, value: str) -> str:
    """Run /save: append the conversation as a line of JSON, which `treespec train --data` reads."""
    if not value:
        raise InputError("/save needs a file name: /save FILE")
    if not conversation.messages:
        raise InputError("there is no message to save yet")
    path = Path(value).expanduser().resolve()
    messages = conversation.opening + conversation.messages
    line = json.dumps({"messages": messages}, ensure_ascii=False).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            if file.read()[-1:] not in (b"", b"\n"):  # the last line has no line break
                line = b"\n" + line
            file.write(line)
    except OSError as error:
        raise InputError(f"cannot write {path}: {describe_os_error(error)}") from error
    return f"saved to {path}"


def show_help(_: ChatSession, __: str) -> str:
    """Run /help."""
    width = find_terminal_width() or sys.maxsize
    lines = []
    for name, command in CHAT_COMMANDS.items():
        usage = f"{name} {command.value}".ljust(HELP_INDENT)
        lines += wrap(usage + command.help, width, subsequent_indent=" " * HELP_INDENT)
    lines.append(f"{CHAT_HINTS}. //x sends /x.")
    return "\n".join(lines)


def leave(_: ChatSession, __: str) -> str:
    """Run /quit."""
    raise EOFError


CHAT_COMMANDS = {
    "/reset": ChatCommand(reset, "begin a new conversation; also /clear"),
    "/undo": ChatCommand(remove_last_turn, "remove the last message and its answer"),
    "/retry": ChatCommand(retry, "answer the last message again"),
}
CHAT_COMMANDS |= {
    f"/{name.replace('_', '-')}": build_setting_command(name) for name in SETTABLE_OPTIONS
}
CHAT_COMMANDS |= {
    "/stats": ChatCommand(show_stats, "acceptance in this conversation"),
    "/save": ChatCommand(save_chat, "append the conversation as a line of JSON", "FILE"),
    "/help": ChatCommand(show_help, "this list"),
    "/quit": ChatCommand(leave, "end; also /exit and /bye"),
}
