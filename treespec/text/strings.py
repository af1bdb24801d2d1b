"""Strings: of a content's parts, with a common beginning, short enough for a context."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from treespec.errors import InputError, TooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # decoded from the first bytes of a character


def join_text_parts(content: object) -> str:
    """The text of a content; parts `{"type": "text", "text": …}` become lines.

    Raises ValueError, which says what it must be, for anything else, such as a part of an image.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple) or not content:
        raise ValueError("must be a string or a list of text parts")
    lines = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"has a part that is no text: {part!r:.60}")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"has a part that is no text: {part!r:.60}")
        lines.append(part["text"])
    return "\n".join(lines)


def require_well_formed(text: str, where: str) -> str:
    """The text itself. Raises InputError for half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} is no valid text: character {error.start + 1} is half of a surrogate pair"
        ) from None
    return text


def count_common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """The number of tokens or characters at the start that both share."""
    count = 0
    for first, second in zip(a, b, strict=False):
        if first != second:
            break
        count += 1
    return count


def count_suffix_overlap(text: str, whole: str) -> int:
    """The number of characters at the end of the text that `whole`, which is longer, begins with."""
    for size in range(min(len(whole) - 1, len(text)), 0, -1):
        if text.endswith(whole[:size]):
            return size
    return 0


def check_fits_context(text: str, tokenizer: "PreTrainedTokenizerBase", context: int | None) -> str:
    """The text itself. Raises TooLong if `context` of the longest tokens do not hold it."""
    if context is not None and len(text) > context:
        least = -(-len(text) // measure_longest_token(tokenizer))
        if least > context:
            raise TooLong(
                f"the prompt has {len(text)} characters, which are {least} tokens or more; the "
                f"target's context holds {context}: shorten it"
            )
    return text


@lru_cache(maxsize=1)
def measure_longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Characters of the longest token: no token stands for more of a text."""
    return max(map(len, tokenizer.get_vocab()))


def decode_after(tokenizer: "PreTrainedTokenizerBase", before: int | None, token: int) -> str:
    """A token's text where it follows another: decoded alone, it may lose its leading space."""

    def text(*tokens: int) -> str:
        return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    if before is None:
        return text(token)
    left = text(before)
    both = text(before, token)
    if INCOMPLETE_CHARACTER in left or not both.startswith(left):
        return text(token)
    return both[len(left) :]


def decode_command_line(text: str, name: str) -> str:
    """A command-line text as UTF-8, whatever the locale. Raises InputError if it is not UTF-8.

    Python turns bytes that its locale lacks into lone surrogates: under LC_ALL=C those of an é.

    name: the option that an error names.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise InputError(
            f"{name} is not UTF-8 text: {text.encode(errors='backslashreplace').decode()[:60]}"
        ) from None
