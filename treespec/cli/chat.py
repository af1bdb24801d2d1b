"""`treespec chat`: a conversation in the terminal, or one message a line through a pipe."""

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, final

import typer

from treespec.cli.answer import AnswerConfig, load_spec
from treespec.cli.early import begin_answers
from treespec.cli.options import takes
from treespec.engine.stats import Stats, figures_of
from treespec.errors import InputError
from treespec.files.printable import one_line, printable
from treespec.options import nearest, option

if TYPE_CHECKING:
    from treespec.api.spec import Spec

HINTS = "/help: commands · Alt-Enter: new line · Ctrl-C: stop an answer · Ctrl-D: quit"
SETTINGS = (  # options that a command of their name sets
    *("system", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "max_new_tokens", "seed", "tree", "verifier"),
)


@dataclass(frozen=True, kw_only=True)
class ChatConfig(AnswerConfig):
    system: str | None = option("system message", None)


@takes(ChatConfig)
def chat(config: ChatConfig) -> None:
    """Chat with a target; drafted tokens are green, or underlined under NO_COLOR. /help: commands.

    Through a pipe every line is a message. Answers go to standard output, figures to standard error.
    """
    # 1. Check what needs no weights, load, and try one prompt: a missing template shows now.
    begin_answers(config)
    conversation = Conversation(load_spec(config), config)
    conversation.spec.request([*conversation.opening, message("user", "Hello")])
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    read: Callable[[], str] = prompt() if terminal else input
    if terminal:
        note(f"{conversation.spec}\n{HINTS}")

    # 2. Messages and slash commands, until the input ends.
    while True:
        try:
            line = read()
            if line.startswith("/") and not line.startswith("//"):
                note(run(conversation, line))
            elif line.strip():
                conversation.answer(line.removeprefix("/").strip())
        except EOFError:
            break
        except KeyboardInterrupt:  # on a terminal it ends the line or the answer alone
            if not terminal:
                raise
        except Exception as error:
            if getattr(error, "exit_code", None) != 2:
                raise
            note(f"treespec: {error}")


def note(text: str) -> None:
    """Show what is no part of an answer."""
    if text:
        typer.secho(printable(text), dim=True, err=True)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@final
@dataclass
class Conversation:
    """messages: the turns that were answered. total: figures of all answers, replaced ones included."""

    spec: "Spec"
    config: ChatConfig
    messages: list[dict[str, str]] = field(default_factory=list)
    total: Stats = field(default_factory=Stats)

    @property
    def opening(self) -> list[dict[str, str]]:
        return [message("system", self.config.system)] if self.config.system else []

    @property
    def last_message(self) -> str:
        """Raises InputError where nothing was asked."""
        if not self.messages:
            raise InputError("nothing has been asked yet")
        return self.messages[-2]["content"]

    def answer(self, text: str, again: bool = False) -> None:
        """Show an answer as it comes, then its figures, and remember the turn.

        Ctrl-C keeps what has been said, and raises KeyboardInterrupt at the end. again: the answer
        replaces the last one.
        """
        # 1. Show the answer, until it ends or Ctrl-C stops it: a first one after the cycle, a second
        #    one at once.
        said = [*(self.messages[:-2] if again else self.messages), message("user", text)]
        stream = self.spec.stream([*self.opening, *said], **self.config.requested)
        stopped = Event()
        mark: dict[str, Any] = (
            {"underline": True} if os.environ.get("NO_COLOR") else {"fg": "green"}
        )

        def stop(*_: object) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            stopped.set()

        signal.signal(signal.SIGINT, stop)
        try:
            for piece in stream:
                typer.secho(printable(piece.text), nl=False, **(mark if piece.drafted else {}))
                if stopped.is_set():
                    break
        except KeyboardInterrupt:
            pass
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            typer.echo()

        # 2. Remember it, unless it is empty, which templates have no place for.
        stats = stream.stats
        reply = stream.output.text.strip()
        self.total.add(stats)
        if reply:
            self.messages = [*said, message("assistant", reply)]
        notes = {
            figures_of(stats, explain=self.total.cycles == stats.cycles): True,
            f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused": True,
            "interrupted": stopped.is_set(),
            "nothing was said, the turn is dropped": not reply,
            "cut: /max-new-tokens N, or /undo if the context is full": stats.truncated,
        }
        note(" · ".join(words for words, holds in notes.items() if holds) + "\n")
        if stopped.is_set():
            raise KeyboardInterrupt


class Command(NamedTuple):
    """run: (conversation, value) -> text to show.

    value: placeholder in the help, "" for a command without a value.
    """

    run: Callable[[Conversation, str], str]
    help: str
    value: str = ""


def run(conversation: Conversation, line: str) -> str:
    """Run a line such as `/temperature 0.7`, and return what to show.

    Raises InputError or TreeError for a line that cannot be run, which changes nothing, and EOFError
    at the end of the conversation.
    """
    name, _, value = line.strip().partition(" ")
    if name not in COMMANDS:
        raise InputError(f"unknown command {name}{nearest(name, COMMANDS)}: /help lists them")
    if value and not COMMANDS[name].value:
        raise InputError(f"{name} takes no value")
    return COMMANDS[name].run(conversation, value.strip())


def setting(name: str) -> Command:
    """The command that shows and sets an option of `ChatConfig`."""
    known = next(known for known in fields(ChatConfig) if known.name == name)
    kind: Any = next((k for k in (int, float) if known.type in (k, k | None)), str)

    def run(conversation: Conversation, value: str) -> str:
        chosen: Any = value
        with suppress(ValueError):  # the option's own error says more
            chosen = None if value == "none" and known.default is None else kind(value)
        if value:
            config = replace(conversation.config, **{name: chosen})
            if name in ("tree", "verifier"):
                options = config.tree, config.verifier, config.allow_lossy
                conversation.spec = conversation.spec.configured(*options)
            conversation.config = config
        if name in ("tree", "verifier"):
            return ", ".join(conversation.spec.drafting_names)
        now = getattr(conversation.config, name)
        return f"{name.replace('_', '-')} {'none' if now is None else now}"

    return Command(run, known.metadata["help"], "TEXT" if kind is str else "N")


def reset(conversation: Conversation, _: str) -> str:
    conversation.messages, conversation.total = [], Stats()
    return "a new conversation"


def undo(conversation: Conversation, _: str) -> str:
    forgotten = conversation.last_message
    conversation.messages = conversation.messages[:-2]
    return f"forgotten: {one_line(forgotten)}"


def retry(conversation: Conversation, _: str) -> str:
    conversation.answer(conversation.last_message, again=True)
    return ""


def stats(conversation: Conversation, _: str) -> str:
    total = conversation.total
    rates = " ".join(f"{rate:.2f}" for rate in total.acceptance_by_depth)
    return f"{figures_of(total, explain=True)} · α by depth {rates or '-'}"


def save(conversation: Conversation, value: str) -> str:
    """Append the conversation as a line of JSON, which `treespec train --data` reads."""
    if not value or not conversation.messages:
        raise InputError("where to? /save FILE" if not value else "nothing has been said yet")
    path = Path(value).expanduser().resolve()
    messages = [*conversation.opening, *conversation.messages]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            joint = b"" if file.read()[-1:] in (b"", b"\n") else b"\n"
            line = json.dumps({"messages": messages}, ensure_ascii=False)
            file.write(joint + line.encode() + b"\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return f"saved to {path}"


def show_help(_: Conversation, __: str) -> str:
    lines = [f"{f'{name} {known.value}':<22} {known.help}" for name, known in COMMANDS.items()]
    return "\n".join([*lines, f"{HINTS}. //x sends /x."])


def leave(_: Conversation, __: str) -> str:
    raise EOFError


COMMANDS = {
    "/reset": Command(reset, "forget what was said"),
    "/undo": Command(undo, "forget the last message and its answer"),
    "/retry": Command(retry, "answer the last message again"),
    **{f"/{name.replace('_', '-')}": setting(name) for name in SETTINGS},
    "/stats": Command(stats, "acceptance in this conversation"),
    "/save": Command(save, "append the conversation as a line of JSON", "FILE"),
    "/help": Command(show_help, "this list"),
    "/quit": Command(leave, "end"),
}


def prompt() -> Callable[[], str]:
    """Asks for a line, with completion, Alt-Enter line breaks and the history in the state directory."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings

    # 1. The history is nobody else's to read. Where it cannot be written, it lasts for this process.
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    file = state / "treespec" / "history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.open("ab").close()
        history: FileHistory | InMemoryHistory = FileHistory(str(file))
    except OSError:
        history = InMemoryHistory()

    # 2. Keys.
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session: PromptSession[str] = PromptSession(
        "> ",
        history=history,
        key_bindings=keys,
        completer=WordCompleter(list(COMMANDS), sentence=True),
        prompt_continuation="  ",
    )
    return session.prompt
