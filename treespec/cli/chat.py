"""`treespec chat`: a conversation in the terminal, or one message a line through a pipe."""

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, final

from treespec.cli.config import ChatConfig, load_spec
from treespec.cli.early import begin_answers
from treespec.cli.options import takes
from treespec.text.strings import CONTROL

if TYPE_CHECKING:
    from prompt_toolkit.history import History

    from treespec.cli.conversation import Conversation
    from treespec.decoding.sequence import Piece


@takes(ChatConfig)
def chat(config: ChatConfig) -> None:
    """Chat with a target; drafted tokens are green, or underlined under NO_COLOR. /help: commands.

    Through a pipe each line is a message. Answers go to standard output, figures to standard error.
    """
    # 1. Check what needs no weights, load, and try one prompt: a missing template shows now.
    begin_answers(config)
    from treespec.cli.commands import Question, in_words, run
    from treespec.cli.conversation import Conversation

    conversation = Conversation(load_spec(config), config)
    conversation.ask("Hello")

    # 2. The first screen.
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(terminal)
    read = prompt() if terminal else pipe()
    if terminal:
        for line in conversation.introduction(screen.mark):
            screen.note(line)

    # 3. Messages and slash commands, until the input ends.
    while True:
        try:
            line = read()
            if line.startswith("/") and not line.startswith("//"):
                said = run(conversation, line)
                if isinstance(said, Question):
                    answer(conversation, said.text, screen, again=True)
                else:
                    screen.say(said)
            elif line.strip():
                answer(conversation, line.removeprefix("/").strip(), screen)
        except EOFError:
            break
        except KeyboardInterrupt:  # on a terminal it only clears the line
            if not terminal:
                raise
        except Exception as error:
            if getattr(error, "exit_code", None) != 2:
                raise
            screen.complain(in_words(error))


def answer(conversation: "Conversation", text: str, screen: "Screen", again: bool = False) -> None:
    """Show an answer as it comes, then its figures. Ctrl-C keeps what has been said.

    again: the answer replaces the last one.
    """
    from treespec.decoding.stats import figures_of

    # 1. Show the answer, until it ends or Ctrl-C stops it.
    stream, before = conversation.ask(text, again), conversation.last_answer
    with unechoed(), stoppable() as stop:
        try:
            for shown, drafted in stripped(stream):
                screen.show(shown, screen.mark if drafted and conversation.colour else "")
                if stop.is_set():
                    break
        except KeyboardInterrupt:  # a second Ctrl-C; with the first, the event is set
            pass
    screen.show("\n")

    # 2. Remember it, and say what happened beside the figures.
    first, stats = not conversation.total.cycles, stream.output.stats
    most = conversation.config.max_new_tokens
    kept = conversation.keep(text, stream.output, interrupted=stop.is_set(), again=again)
    fixed = "temperature is 0" if conversation.config.temperature == 0 else "/seed is set"
    marks = {
        "interrupted": stop.is_set(),
        "nothing was said, "
        + ("the last answer stays" if again else "the turn is dropped"): not kept,
        f"cut at {most} tokens: /max-new-tokens N": stats.truncated and stats.new_tokens == most,
        "cut, the context is full: /undo or /reset": stats.truncated and stats.new_tokens < most,
        f"the same answer: {fixed}": again and kept and conversation.last_answer == before,
    }
    reused = f"{stats.cached_tokens} of {stats.prompt_tokens} prompt tokens reused"
    screen.note(
        " · ".join(
            [figures_of(stats, explain=first), reused, *(words for words in marks if marks[words])]
        )
    )
    if screen.terminal:
        screen.show("\n")
    if stop.is_set() and not screen.terminal:
        raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[Event]:
    """Inside, Ctrl-C sets the event: the loop ends after its cycle. A second one ends it at once."""
    stop = Event()

    def handle(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def unechoed() -> Iterator[None]:
    """Inside, typed keys wait for the prompt and do not show amid the answer."""
    if sys.platform == "win32" or not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def stripped(pieces: Iterable["Piece"]) -> Iterator[tuple[str, bool]]:
    """(text, drafted) of each piece, without white space before or after the whole answer."""
    held, begun = "", False
    for piece in pieces:
        text = held + piece.text if begun else piece.text.lstrip()
        shown = text.rstrip()
        held, begun = text[len(shown) :], begun or bool(shown)
        yield shown, piece.drafted


@final
class Screen:
    """Prints answers and notes. Through a pipe, notes go to standard error."""

    def __init__(self, terminal: bool) -> None:
        from rich.console import Console

        from treespec.cli.wrapped import Wrapped

        self.terminal = terminal
        self.answers = Console(color_system="auto" if terminal else None)
        self.notes = self.answers if terminal else Console(color_system=None, stderr=True)
        self.wrapped = Wrapped(self.write, lambda: self.answers.width) if terminal else None

    @property
    def mark(self) -> str:
        """The style of drafted tokens; "" where the terminal has none."""
        if self.answers.color_system is None:
            return ""
        return "underline" if self.answers.no_color else "green"

    def show(self, text: str, style: str = "") -> None:
        """Show a part of an answer. A terminal shows a word once it is whole."""
        (self.wrapped.show if self.wrapped else self.write)(text.translate(CONTROL), style)

    def write(self, text: str, style: str = "") -> None:
        from rich.segment import Segment, Segments
        from rich.style import Style

        segment = Segment(text, Style.parse(style))
        self.answers.print(Segments([segment]), crop=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        if self.wrapped and self.wrapped.amid_line:  # an error ended the answer
            self.show("\n")
        text = text.translate(CONTROL)
        self.notes.print(
            text,
            style=style,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=not self.terminal,
        )

    def note(self, text: str) -> None:
        self.say(text, "dim")

    def complain(self, text: str) -> None:
        self.say(text if self.terminal else f"treespec: {text}", "red")


def pipe() -> Callable[[], str]:
    """Reads a line of standard input."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    return input


def prompt() -> Callable[[], str]:
    """Asks for a line, with history, completion of slash commands and Alt-Enter line breaks."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from treespec.cli.commands import COMMANDS

    # 1. Alt-Enter.
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    # 2. Completion: commands first, then the values of one.
    values = [f"{name} {value}" for name, command in COMMANDS.items() for value in command.choices]

    def lines() -> list[str]:
        return values if " " in get_app().current_buffer.text else list(COMMANDS)

    session: PromptSession[str] = PromptSession(
        "> ",
        history=history(),
        key_bindings=keys,
        completer=WordCompleter(lines, sentence=True),
        prompt_continuation="  ",
    )
    return session.prompt


def history() -> "History":
    """Kept in the user's state directory, or in memory where that cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    file = state / "treespec" / "history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.open("ab").close()
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
