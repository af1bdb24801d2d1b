"""Decide at which token a text ends, and decode its tokens as they come."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from treespec.errors import InputError
from treespec.text.strings import INCOMPLETE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@final
class Stop:
    """How much of one stop string ends the text (Knuth, Morris, Pratt 1977).

    A character costs constant time on average, and the string's length costs nothing.
    matched: characters of the string, but not all of them, that end the text.
    borders: for each first part of the string, up to the longest one matched so far, the length of
    the longest shorter part that ends it, too.
    """

    def __init__(self, string: str) -> None:
        self.string, self.matched, self.borders = string, 0, [0]

    def take(self, character: str) -> bool:
        """Append a character to the text; returns whether it completes the string."""
        self.matched = self._longer(self.matched, character)
        if self.matched > len(self.borders):
            self.borders.append(self._longer(self.borders[-1], character))
        complete = self.matched == len(self.string)
        if complete:
            self.matched = self.borders[-1]
        return complete

    def _longer(self, matched: int, character: str) -> int:
        """`matched` after another character."""
        while matched and self.string[matched] != character:
            matched = self.borders[matched - 1]
        return matched + (self.string[matched] == character)


@final
class Ending:
    """Decides token by token where a text ends. Later tokens are neither returned nor counted.

    A text ends with an end-of-sequence token (kept), with the token that completes a stop string
    (kept, but the text ends before the string), or after max_new_tokens. A stop string that is
    complete before the text has `least` tokens is part of the text. A stop string that is a
    special token ends the text by its id. The pieces of text add up to `tokenizer.decode` without
    special tokens, however the tokens are grouped. One exception: byte-fallback tokens
    (SentencePiece) that never become a character may lose some of their replacement characters.

    Raises InputError for an empty stop string, and for stop strings without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase | None",
        eos: frozenset[int],
        stop: Sequence[str],
        max_new_tokens: int,
        least: int = 0,
    ) -> None:
        if stop and tokenizer is None:
            raise InputError(
                "the target has no tokenizer: stop strings cannot be found in its tokens"
            )
        if "" in stop:
            raise InputError("stop has an empty string: leave it out")
        named = tokenizer.added_tokens_decoder if tokenizer and stop else {}
        special = [i for i, token in named.items() if token.special and token.content in stop]
        self.eos = eos | set(special)
        self.tokenizer, self.left = tokenizer, max_new_tokens
        self.stops = [Stop(string) for string in stop]
        self.early = least - 1  # tokens before the first that may complete a stop string
        self.window: list[int] = []  # the last tokens, decoded together: text depends on its left
        self.border = 0  # tokens of the window up to the last complete character
        self.given = 0  # characters of the window's text that were returned
        self.held = ""  # text that may become a stop string
        self.finished = max_new_tokens <= 0
        self.stopped = False  # whether a stop string has ended the text
        self.truncated = False  # whether the text ended for want of room

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Append tokens until the text ends. Returns the tokens kept and the text that they add."""
        kept, text = [], ""
        for token in tokens:
            if self.finished:
                break
            kept.append(token)
            self.left -= 1
            self.early -= 1
            ended = token in self.eos
            self.finished = ended or self.left <= 0
            text += self._cut(self._text(token))
            self.truncated = self.left <= 0 and not (ended or self.stopped)
        if self.finished:
            text, self.held = text + self.held, ""
        return kept, text

    def _text(self, token: int) -> str:
        """The text that this token makes certain. An incomplete character is held back."""
        if self.tokenizer is None:
            return ""
        self.window.append(token)
        text = self._decode(self.window)
        certain = text if self.finished else text.rstrip(INCOMPLETE)
        new = certain[self.given :]
        self.given = max(self.given, len(certain))
        if new and certain == text:  # a window without text could lose its first token's space
            self.window = self.window[self.border :]
            self.border, self.given = len(self.window), len(self._decode(self.window))
        return new

    def _decode(self, tokens: list[int]) -> str:
        assert self.tokenizer is not None
        # Cleaning up spaces would change text that was already returned.
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))

    def _cut(self, text: str) -> str:
        """Cut at a stop string; hold back what may become one."""
        # 1. Where the first stop string begins that this text completes.
        starts = []
        for stop in self.stops:
            ends = [place for place, one in enumerate(text, len(self.held) + 1) if stop.take(one)]
            starts += [ends[0] - len(stop.string)] if ends else []
        text = self.held + text
        if starts and self.early < 0:
            self.finished = self.stopped = True
            self.held = ""
            return text[: min(starts)]

        # 2. What no stop string begins with.
        certain = len(text) - max((stop.matched for stop in self.stops), default=0)
        self.held = text[certain:]
        return text[:certain]
