"""Text that is safe to print: a model's output, or a name from outside."""

# Characters that move the cursor, change the terminal or turn the direction of text are shown as
# symbols. The C1 controls (U+0080 to U+009F) are escapes to some terminals: U+009B begins a
# sequence as ESC [ does.
REPLACED = "\N{REPLACEMENT CHARACTER}"
DIRECTIONS = (
    *range(0x202A, 0x202F),  # embeddings and overrides
    *range(0x2066, 0x206A),  # isolates
    *(0x061C, 0x200E, 0x200F),  # marks
    *range(0x206A, 0x2070),  # deprecated format controls
)
HIDDEN = (  # without width
    *(0x00AD, 0x180E, 0x200B, 0xFEFF),
    *range(0x2060, 0x2065),
    *range(0xFFF9, 0xFFFC),
)
TAGS = range(0xE0000, 0xE0080)  # text that no terminal shows
LINES = (0x2028, 0x2029)  # separators that some terminals break a line at

CONTROL: dict[int, str] = {code: chr(0x2400 + code) for code in range(32)}
CONTROL |= dict.fromkeys(
    (*range(0x7F, 0xA0), *DIRECTIONS, *HIDDEN, *TAGS, *range(0xD800, 0xE000)), REPLACED
)
CONTROL |= dict.fromkeys(LINES, "\n")
CONTROL |= {ord("\n"): "\n", ord("\t"): "\t", ord("\r"): ""}


def printable(text: str) -> str:
    """The text with symbols for control characters, so that a terminal only shows it.

    Joiners (U+200C, U+200D) stay: Persian, Hindi and emoji need them.
    """
    return text.translate(CONTROL)


def one_line(text: str) -> str:
    """`printable`, with symbols for line breaks and tabs."""
    return printable(text).replace("\n", "␊").replace("\t", "␉")
