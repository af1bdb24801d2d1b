"""Decide at which token an answer ends, and decode its tokens as they arrive."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from treespec.errors import InputError
from treespec.text.strings import INCOMPLETE_CHARACTER, count_suffix_overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Limits of a request: each token's text is compared with every prefix of every stop string.
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000


@final
class Ending:
    """Decides token by token where an answer ends. Later tokens are neither returned nor counted.

    An answer ends with an end-of-sequence token (kept), with the token that completes a stop string (the token is
    kept, but the text ends before the string), or after `max_new_tokens`. A stop string that is a special token ends
    the answer by its id. The returned pieces of text add up to `tokenizer.decode` without special tokens, however
    the tokens are grouped. One exception: byte-fallback tokens (SentencePiece) that never become a character may
    lose some of their replacement characters.

    The tokens of `Hello <stop>` arrive one at a time, with the stop string "<stop>":

        token     Hel   lo    " <"   st    op>
        returned  Hel   lo    " "    -     -       "<" and "<st" are held back: they may become the stop string

    Args:
        tokenizer: decodes the tokens. None returns no text.
        eos: ids of the end-of-sequence tokens.
        stop: stop strings.
        max_new_tokens: maximum number of tokens of the answer.
        least: a stop string that is complete before the answer has this number of tokens is part of the text.
            Default: 0.

    Raises: InputError for an empty or a long stop string, for too many, and for stop strings without a tokenizer.
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
        special_stop_ids: set[int] = set()  # ids of stop strings that are special tokens
        if tokenizer and stop:
            for token_id, token in tokenizer.added_tokens_decoder.items():
                if token.special and token.content in stop:
                    special_stop_ids.add(token_id)
        self.eos = eos | special_stop_ids
        self.tokenizer = tokenizer
        self.left = max_new_tokens
        self.stops = stop
        self.early = least - 1  # tokens still to come in which no stop string may end
        # The last tokens, decoded together: a token's text depends on earlier tokens.
        self.window: list[int] = []
        self.border = 0  # number of tokens in the window up to the last complete character
        self.given = 0  # number of characters of the window's text that were returned
        self.held = ""  # text held back: it may become a stop string
        self.finished = max_new_tokens <= 0
        self.stopped = False  # whether a stop string has ended the text
        self.truncated = False  # whether max_new_tokens ended the text

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Append tokens until the answer ends. Returns (kept tokens, the text that they add)."""
        kept_tokens = []
        text = ""
        for token in tokens:
            if self.finished:
                break
            kept_tokens.append(token)
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
        return kept_tokens, text

    def _decode_certain_text(self, token: int) -> str:
        """The new text after this token. An incomplete character is held back."""
        if self.tokenizer is None:
            return ""
        self.window.append(token)
        text = self._decode(self.window)
        complete_text = text
        if not self.finished:
            complete_text = text.rstrip(INCOMPLETE_CHARACTER)
        new_text = complete_text[self.given :]
        self.given = max(self.given, len(complete_text))
        # A window without text could lose its first token's space.
        if new_text and complete_text == text:
            self.window = self.window[self.border :]
            self.border = len(self.window)
            self.given = len(self._decode(self.window))
        return new_text

    def _decode(self, tokens: list[int]) -> str:
        """Decode tokens without special tokens."""
        assert self.tokenizer is not None
        # Cleaning up spaces would change text that was already returned.
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(tokens, **options))

    def _cut(self, text: str) -> str:
        """Cut the text at a stop string, and hold back an end that may become one."""
        held_before = len(self.held)
        text = self.held + text
        if self.early < 0:
            starts = []
            for stop in self.stops:
                start = text.find(stop, max(0, held_before + 1 - len(stop)))
                if start >= 0:
                    starts.append(start)
            if starts:
                self.finished = True
                self.stopped = True
                self.held = ""
                return text[: min(starts)]
        held_characters = max((count_suffix_overlap(text, stop) for stop in self.stops), default=0)
        certain_characters = len(text) - held_characters
        self.held = text[certain_characters:]
        return text[:certain_characters]
