"""Print an answer on a terminal as it arrives, without breaking its words at the right edge."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from shutil import get_terminal_size
from typing import Any, final

import typer

Style = dict[str, Any]  # keywords of `typer.secho`


def write_styled(text: str, style: Style) -> None:
    """Write a piece of an answer on standard output."""
    if style:
        typer.secho(text, nl=False, **style)
    else:
        print(text, end="", flush=True)


def count_columns(text: str) -> int:
    """Count the columns of a terminal that a text takes."""
    from rich.cells import cell_len

    return cell_len(text)


def find_terminal_width() -> int | None:
    """The number of columns of the terminal that shows standard output; None for a pipe."""
    if not sys.stdout.isatty():
        return None
    return get_terminal_size().columns


@final
@dataclass
class WordWrapper:
    """Holds each word back until it is whole, and puts it on the next line if the present one has no room.

        wrapper = WordWrapper(width=12)      the tree is |
        wrapper.add("the tree is dra", {})   drafted     |
        wrapper.add("fted", style)
        wrapper.finish()

    Words of Chinese or Japanese characters have no spaces: each wide character is a word.

    Attributes:
        width: columns of the terminal; None for a pipe, which gets the text as it comes.
        write: writes a text in a style.
    """

    width: int | None
    write: Callable[[str, Style], None] = write_styled
    _column: int = 0  # of the cursor
    _word: list[tuple[str, Style]] = field(default_factory=list)  # characters that are held back

    def add(self, text: str, style: Style) -> None:
        """Add a piece of the answer. style: of its characters."""
        if self.width is None:
            self.write(text, style)
            return
        for character in text:
            is_wide = count_columns(character) > 1
            if character.isspace() or is_wide:
                self._write_word()
            self._word.append((character, style))
            if character.isspace():
                self._word.pop()
                self._write_space(character, style)
            elif is_wide or len(self._word) >= self.width:
                self._write_word()

    def finish(self) -> None:
        """Write what is held back, at the end of the answer."""
        self._write_word()

    def _write_word(self) -> None:
        """Write the word, on the next line if it does not fit."""
        columns = count_columns("".join(character for character, _ in self._word))
        if self._column and self.width and self._column + columns > self.width:
            self._write_line_break({})
        text = ""
        last_style: Style = {}
        for character, style in self._word:
            if text and style != last_style:
                self.write(text, last_style)
                text = ""
            text += character
            last_style = style
        if text:
            self.write(text, last_style)
        self._column += columns
        self._word = []

    def _write_space(self, space: str, style: Style) -> None:
        """Write white space; at the right edge a line break instead."""
        if space == "\n" or (self.width and self._column >= self.width):
            self._write_line_break(style)
            return
        self.write(space, style)
        self._column += 1
        if space == "\t":
            self._column += -self._column % 8

    def _write_line_break(self, style: Style) -> None:
        self.write("\n", style)
        self._column = 0
