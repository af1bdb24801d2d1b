"""Where a text ends, to the token, and the text of its tokens as they come."""

from collections.abc import Sequence
from typing import Any, final


@final
class Ending:
    """Decides token by token; what comes after the end is neither returned nor counted.

    A text ends with an end-of-sequence token (kept), with the token that completes a stop string (kept, but
    the text ends before the string), or after max_new_tokens.
    """

    def __init__(self, tokenizer: Any, eos: frozenset[int], stop: Sequence[str], max_new_tokens: int) -> None:
        self.tokenizer, self.eos, self.stop, self.left = tokenizer, eos, tuple(stop), max_new_tokens
        self.ids: list[int] = []
        self.start = self.shown = 0  # ids[start:] are decoded together; those before `shown` were shown
        self.held = ""  # text that may become a stop string
        self.finished = max_new_tokens <= 0

    def take(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Append tokens until the text ends. Returns the tokens kept and the text that they add."""
        kept, text = [], ""
        for token in tokens:
            if self.finished:
                break
            kept.append(token)
            self.ids.append(token)
            self.left -= 1
            self.finished = token in self.eos or self.left <= 0
            text += self._show(self._decode_next())
        if self.finished:
            text, self.held = text + self.held, ""
        return kept, text

    def _decode_next(self) -> str:
        """The text that is certain now: nothing while the last character is incomplete."""
        if self.tokenizer is None:
            return ""
        before = self.tokenizer.decode(self.ids[self.start : self.shown], skip_special_tokens=True)
        after = self.tokenizer.decode(self.ids[self.start :], skip_special_tokens=True)
        if after.endswith("\N{REPLACEMENT CHARACTER}") and not self.finished:
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return after[len(before) :]

    def _show(self, text: str) -> str:
        """Cut at a stop string; hold back what may become one."""
        text = self.held + text
        found = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if found:
            self.finished, self.held = True, ""
            return text[: min(found)]
        overlap = max(
            (n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])),
            default=0,
        )
        self.held = text[len(text) - overlap :]
        return text[: len(text) - overlap]
