"""Helpers for strings: joined message parts, common prefixes, context limits, single tokens."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.errors import InputError, TooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character decode to


def join_text_parts(content: object) -> str:
    """The text of a message's content: a string, or parts `{"type": "text", "text": …}`, joined by line breaks.

    Raises: ValueError, which says what is expected, for anything else, such as an image part.
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
    """Return the text. Raises InputError if it holds half of a surrogate pair. where: what the error names."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} is no valid text: character {error.start + 1} is half of a surrogate pair"
        ) from None
    return text


def count_common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """The length of the common prefix of two sequences of tokens or characters."""
    count = 0
    for first, second in zip(a, b, strict=False):
        if first != second:
            break
        count += 1
    return count


def count_suffix_overlap(text: str, whole: str) -> int:
    """The length of the longest end of the text that is a proper prefix of `whole`.

    The text `ab<st` ends with three characters of the stop string `<stop>`.
    """
    for size in range(min(len(whole) - 1, len(text)), 0, -1):
        if text.endswith(whole[:size]):
            return size
    return 0


def check_fits_context(text: str, tokenizer: "PreTrainedTokenizerBase", context: int | None) -> str:
    """Return the text. Raises TooLong if it needs more than `context` tokens even with the longest tokens."""
    if context is not None and len(text) > context:
        min_tokens = -(-len(text) // measure_longest_token(tokenizer))
        if min_tokens > context:
            raise TooLong(
                f"the prompt has {len(text)} characters, which are {min_tokens} tokens or more; the "
                f"target's context holds {context}: shorten it"
            )
    return text


@lru_cache(maxsize=1)
def measure_longest_token(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The number of characters of the longest token in the vocabulary."""
    return max(map(len, tokenizer.get_vocab()))


def decode_after(tokenizer: "PreTrainedTokenizerBase", before: int | None, token: int) -> str:
    """A token's text after the token `before`: decoded by itself, it may lose its leading space."""

    def text(*tokens: int) -> str:
        return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    if before is None:
        return text(token)
    before_text = text(before)
    joint_text = text(before, token)
    if INCOMPLETE_CHARACTER in before_text or not joint_text.startswith(before_text):
        return text(token)
    return joint_text[len(before_text) :]


def decode_command_line(text: str, name: str) -> str:
    """Decode a command-line argument as UTF-8, whatever the locale.

    Python turns bytes that its locale lacks into lone surrogates, such as those of an é under LC_ALL=C.

    Args:
        text: the argument as Python has it.
        name: the option that an error names.

    Raises: InputError if the argument is not UTF-8.
    """
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:
        raise InputError(
            f"{name} is not UTF-8 text: {text.encode(errors='backslashreplace').decode()[:60]}"
        ) from None


def is_file(text: str) -> bool:
    """Whether a command-line argument is the path of a file. False for texts that can be no path."""
    try:
        return Path(text).expanduser().is_file()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, or ~ of no user
        return False


def read_option_text(option: str, file: str) -> str:
    """Read a file of UTF-8 text. Raises InputError if it cannot be read. option: the one that names the file."""
    try:
        return Path(file).expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeError) as error:
        raise InputError(f"cannot read {option} {file}: {error}") from error
