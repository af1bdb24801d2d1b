"""Log-probabilities of tokens as OpenAI writes them, for chats and for completions."""

import re
from functools import lru_cache
from typing import Any, final

from treespec.decoding.sequence import Piece, TokenLogprob
from treespec.text.strings import INCOMPLETE, text_after

LEAST = -9999.0  # OpenAI's logarithm of 0, which JSON has no number for


@final
class LogprobWriter:
    """The tokens of one answer, in the order in which they come.

    before: the token before the answer; the text of a token depends on it. hidden: tokens that are
    no part of the text, such as the end-of-sequence token. offset: characters before the answer.
    """

    def __init__(
        self, tokenizer: Any, before: int, hidden: frozenset[int], offset: int = 0
    ) -> None:
        self.tokenizer, self.before, self.hidden = tokenizer, before, hidden
        self.offset = offset

    def chat(self, piece: Piece) -> dict[str, Any] | None:
        """`logprobs` of a choice or chunk of a chat; None where the request asked for none."""
        if piece.logprobs is None:
            return None
        content = []
        for told in self._shown(piece):
            fields = self._token(told.token, told.logprob)
            fields["top_logprobs"] = [self._token(*likely) for likely in told.top]
            content.append(fields)
            self.before = told.token
        return {"content": content, "refusal": None}

    def completion(self, piece: Piece) -> dict[str, Any] | None:
        """`logprobs` of a choice or chunk of a completion."""
        if piece.logprobs is None:
            return None
        fields: dict[str, Any] = {name: [] for name in COMPLETION}
        for told in self._shown(piece):
            own = self._token(told.token, told.logprob)
            tops = [self._token(*likely) for likely in told.top]
            fields["tokens"].append(own["token"])
            fields["token_logprobs"].append(own["logprob"])
            fields["top_logprobs"].append({top["token"]: top["logprob"] for top in tops})
            fields["text_offset"].append(self.offset)
            self.offset += len(own["token"])
            self.before = told.token
        return fields

    def _shown(self, piece: Piece) -> list[TokenLogprob]:
        return [told for told in piece.logprobs or () if told.token not in self.hidden]

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text, written = words(self.tokenizer, self.before, token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(written)}


COMPLETION = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(parts: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The logprobs of several pieces as one."""
    told = [part for part in parts if part is not None]
    if not told:
        return None
    lists = [name for name, value in told[0].items() if isinstance(value, list)]
    return told[0] | {name: [one for part in told for one in part[name]] for name in lists}


def words(tokenizer: Any, before: int, token: int) -> tuple[str, bytes]:
    """A token's text where it follows another, and its bytes, which may be part of a character.

    Without a tokenizer the text is the token's id.
    """
    if tokenizer is None:
        return f"token_id:{token}", b""

    # 1. The text.
    alone = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if INCOMPLETE not in alone:
        own = text_after(tokenizer, before, token)
        return own, own.encode()

    # 2. The bytes of part of a character: by fallback tokens such as <0xE2>, or by byte-level BPE.
    name = tokenizer.convert_ids_to_tokens(token)
    if fallback := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return alone, bytes.fromhex(fallback[1])
    if all(letter in _byte_letters() for letter in name):
        return alone, bytes(_byte_letters()[letter] for letter in name)
    return alone, alone.encode()


@lru_cache
def _byte_letters() -> dict[str, int]:
    """The byte behind each letter of byte-level BPE."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
