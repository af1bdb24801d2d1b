"""Text that comes in pieces, broken between words at a terminal's right edge."""

from collections.abc import Callable
from itertools import groupby
from typing import final

from rich.cells import cell_len

TAB = 8  # columns that a tab takes at most


@final
class Wrapped:
    """Holds each word back until it ends, for only then it is known to fit in the line.

    A character of two columns, such as a Chinese one, is a word of its own. A word that is longer
    than a line fills lines.
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
