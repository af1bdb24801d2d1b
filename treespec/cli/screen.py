"""Where a conversation is read and shown: a terminal, or a pipe. rich and prompt_toolkit load here."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper
from itertools import groupby
from pathlib import Path
from typing import final

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from treespec.cli.conversation import COMMANDS, Conversation
from treespec.text.strings import CONTROL

HINTS = "/help: commands · Alt-Enter: new line · Ctrl-C: stop an answer · Ctrl-D: quit"
TAB = 8  # columns that a tab takes at most


@final
class Screen:
    """Prints answers and notes. Through a pipe, notes go to standard error.

    mark: the style of drafted tokens; "" where the terminal has none.
    """

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self.answers = Console(color_system="auto" if terminal else None)
        self.notes = self.answers if terminal else Console(color_system=None, stderr=True)
        self.wrapped = Wrapped(self.write, lambda: self.answers.width) if terminal else None
        plain, no_colour = self.answers.color_system is None, self.answers.no_color
        self.mark = "" if plain else "underline" if no_colour else "green"

    def show(self, text: str, style: str = "") -> None:
        """Show a part of an answer. A terminal shows a word once it is whole."""
        (self.wrapped.show if self.wrapped else self.write)(text.translate(CONTROL), style)

    def write(self, text: str, style: str = "") -> None:
        segment = Segment(text, Style.parse(style))
        self.answers.print(Segments([segment]), crop=False, soft_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        if self.wrapped and self.wrapped.amid_line:  # an error ended the answer
            self.show("\n")
        shown = Text(text.translate(CONTROL), style)
        self.notes.print(shown, soft_wrap=not self.terminal)

    def reader(self) -> Callable[[], str]:
        """A function that reads the next line."""
        if self.terminal:
            return prompt()
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(errors="replace")
        return input


def introduction(conversation: Conversation, mark: str) -> list[str]:
    """The first screen. mark: the style of drafted tokens."""
    target, drafts = conversation.spec.target, [f"drafts    {conversation.drafting()}"]
    if conversation.spec.source is not None:
        drafter = conversation.config.drafter or f"head {conversation.config.head}"
        marks = {"green": "green", "underline": "underlined"}
        shown = f"; accepted ones are {marks[mark]}" if mark else ""
        own = conversation.drafting().replace("verifier ", "verifier  ", 1)
        drafts = [f"drafts    {drafter}{shown}", own]
    devices = ", ".join(sorted({str(p.device) for p in target.model.parameters()}))
    precision = str(target.dtype).removeprefix("torch.")
    return [f"target    {conversation.config.target}, {precision} on {devices}", *drafts, HINTS]


@final
class Wrapped:
    """Breaks an answer that comes in pieces between words, at a terminal's right edge.

    Holds each word back until it ends, for only then it is known to fit in the line. A character of
    two columns, such as a Chinese one, is a word of its own. A word that is longer than a line
    fills lines.
    write: (text, style). width: the columns of the terminal now.
    """

    def __init__(self, write: Callable[[str, str], None], width: Callable[[], int]) -> None:
        self.write, self.width = write, width
        self.column = 0  # cells that are written in the present line
        self.blanks: list[tuple[str, str]] = []  # characters before the word, each with its style
        self.word: list[tuple[str, str]] = []

    def show(self, text: str, style: str = "") -> None:
        for character in text:
            columns = cell_len(character)  # 0: it belongs to the character before
            beside_wide = columns > 1 or (columns and cells(self.word[:1]) > 1)
            if self.word and (character.isspace() or beside_wide):
                self.flush()
            if character == "\n":
                self.write("\n", "")
                self.column, self.blanks = 0, []
            else:
                (self.blanks if character.isspace() else self.word).append((character, style))
            if cells(self.word) >= self.width():
                self.flush()

    @property
    def amid_line(self) -> bool:
        return bool(self.column or self.word)

    def flush(self) -> None:
        """Write what is held back, in the next line where it does not fit in this one."""
        width, held = self.width(), [*self.blanks, *self.word]
        if self.column and self.column + cells(held) > width:
            self.write("\n", "")
            self.column, held = 0, self.word
        for style, part in groupby(held, key=lambda pair: pair[1]):
            self.write("".join(character for character, _ in part), style)
        self.column = (self.column + cells(held) - 1) % width + 1 if held else self.column
        self.blanks, self.word = [], []


def cells(held: list[tuple[str, str]]) -> int:
    """Columns that characters take."""
    return sum(TAB if character == "\t" else cell_len(character) for character, _ in held)


def prompt() -> Callable[[], str]:
    """Asks for a line, with history, completion of slash commands and Alt-Enter line breaks."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    values = [f"{name} {value}" for name, command in COMMANDS.items() for value in command.choices]

    def lines() -> list[str]:  # commands first, then the values of one
        return values if " " in get_app().current_buffer.text else list(COMMANDS)

    session: PromptSession[str] = PromptSession(
        "> ",
        history=history(),
        key_bindings=keys,
        completer=WordCompleter(lines, sentence=True),
        prompt_continuation="  ",
    )
    return session.prompt


def history() -> History:
    """Kept in the user's state directory, or in memory where that cannot be written."""
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    file = state / "treespec" / "history"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(0o600)
        file.open("ab").close()
    except OSError:
        return InMemoryHistory()
    return FileHistory(str(file))
