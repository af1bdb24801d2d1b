"""Decide at which token a text ends, and decode its tokens as they come."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from treespec.errors import InputError
from treespec.text.strings import INCOMPLETE_CHARACTER, count_suffix_overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Stop strings, and characters of one: each token's text is compared with all of their beginnings.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000


@final
class Ending:
    """Decides token by token where a text ends. Later tokens are neither returned nor counted.

    A text ends with an end-of-sequence token (kept), with the token that completes a stop string
    (kept, but the text ends before the string), or after max_new_tokens. A stop string that is
    complete before the text has `least` tokens is part of the text. A stop string that is a
    special token ends the text by its id. The pieces of text add up to `tokenizer.decode` without
    special tokens, however the tokens are grouped. One exception: byte-fallback tokens
    (SentencePiece) that never become a character may lose some of their replacement characters.

    Raises InputError for an empty or a long stop string, for too many, and for stop strings without a tokenizer.
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
        if len(stop) > MAX_STOP_STRINGS or not all(
            0 < len(string) <= MAX_STOP_CHARACTERS for string in stop
        ):
            raise InputError(
                f"stop takes {MAX_STOP_STRINGS} strings at most, each of 1 to {MAX_STOP_CHARACTERS} characters"
            )
        special: set[int] = set()  # stop strings that are special tokens
        if tokenizer and stop:
            for token_id, token in tokenizer.added_tokens_decoder.items():
                if token.special and token.content in stop:
                    special.add(token_id)
        self.eos = eos | special
        self.tokenizer = tokenizer
        self.left = max_new_tokens
        self.stops = stop
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
        kept = []
        text = ""
        for token in tokens:
            if self.finished:
                break
            kept.append(token)
            self.left -= 1
            self.early -= 1
            ended = token in self.eos
            if ended or self.left <= 0:
                self.finished = True
            text += self._cut(self._decode_certain_text(token))
            if self.left <= 0 and not ended and not self.stopped:
                self.truncated = True
        if self.finished:
            text = text + self.held
            self.held = ""
        return kept, text

    def _decode_certain_text(self, token: int) -> str:
        """The text that this token makes certain. An incomplete character is held back."""
        if self.tokenizer is None:
            return ""
        self.window.append(token)
        text = self._decode(self.window)
        certain = text
        if not self.finished:
            certain = text.rstrip(INCOMPLETE_CHARACTER)
        new = certain[self.given :]
        self.given = max(self.given, len(certain))
        if new and certain == text:  # a window without text could lose its first token's space
            self.window = self.window[self.border :]
            self.border = len(self.window)
            self.given = len(self._decode(self.window))
        return new

    def _decode(self, tokens: list[int]) -> str:
        assert self.tokenizer is not None
        # Cleaning up spaces would change text that was already returned.
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))

    def _cut(self, text: str) -> str:
        """Cut at a stop string; hold back what may become one."""
        before = len(self.held)
        text = self.held + text
        if self.early < 0:
            starts = []
            for stop in self.stops:
                start = text.find(stop, max(0, before + 1 - len(stop)))
                if start >= 0:
                    starts.append(start)
            if starts:
                self.finished = True
                self.stopped = True
                self.held = ""
                return text[: min(starts)]
        held_characters = max((count_suffix_overlap(text, stop) for stop in self.stops), default=0)
        certain = len(text) - held_characters
        self.held = text[certain:]
        return text[:certain]
