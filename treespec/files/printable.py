"""Make text safe for a terminal: no character moves the cursor or changes the terminal's state."""

from unicodedata import bidirectional, category

REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
JOINER_CODES = (0x200C, 0x200D)  # joiners that Persian, Hindi and emoji need


class Symbols(dict[int, str]):
    """A table for `str.translate`, filled on demand.

    It replaces characters that move the cursor, change the terminal, change the direction of text, or have no width:
    control and format characters, except Arabic number signs, and surrogates. Some terminals take the C1 controls
    (U+0080 to U+009F) for escapes: U+009B begins a sequence as ESC [ does.
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
)  # line and paragraph separators, at which some terminals break the line


def to_printable(text: str) -> str:
    """Replace control characters by symbols, such as ESC by ␛. Line breaks and tabs stay."""
    return text.translate(CONTROL_SYMBOLS)


def to_one_line(text: str) -> str:
    """Replace control characters by symbols, line breaks and tabs included."""
    return to_printable(text).replace("\n", "␊").replace("\t", "␉")
