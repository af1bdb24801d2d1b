"""Text that a terminal only shows: no character of it moves the cursor or changes the terminal."""

from unicodedata import bidirectional, category

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
JOINER_CODES = (0x200C, 0x200D)  # Persian, Hindi and emoji need them


class Symbols(dict[int, str]):
    """A table for `str.translate`, filled as characters come.

    Characters that move the cursor, change the terminal, turn the direction of text or have no width
    are shown as symbols: controls, formats but for Arabic signs of numbers, and surrogates. The C1
    controls (U+0080 to U+009F) are escapes to some terminals: U+009B begins a sequence as ESC [ does.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        hidden = category(character) in ("Cc", "Cf", "Cs") and bidirectional(character) != "AN"
        self[code] = REPLACEMENT_CHARACTER if hidden and code not in JOINER_CODES else character
        return self[code]


CONTROL_SYMBOLS = Symbols({code: chr(0x2400 + code) for code in range(32)})
CONTROL_SYMBOLS |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}
CONTROL_SYMBOLS |= dict.fromkeys(
    (0x2028, 0x2029), "\n"
)  # separators that some terminals break a line at


def to_printable(text: str) -> str:
    """The text with symbols for control characters, so that a terminal only shows it."""
    return text.translate(CONTROL_SYMBOLS)


def to_one_line(text: str) -> str:
    """`to_printable`, with symbols for line breaks and tabs."""
    return to_printable(text).replace("\n", "␊").replace("\t", "␉")
