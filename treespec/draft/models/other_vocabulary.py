"""The tokens that two vocabularies share.

Tokens are compared by the bytes of text that each stands for.

    byte-level BPE (GPT-2, Llama 3, Qwen)    `Ġthe` stands for ` the`, `Ċ` for a line break
    SentencePiece (Llama 2, Gemma)           `▁the` stands for ` the`, `<0x0A>` for a line break

Special tokens stand for no text: two of them are the same if their names are.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from treespec.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_PATTERN = re.compile("<0x([0-9A-F]{2})>")  # a byte that no other token holds, in SentencePiece
SENTENCEPIECE_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
SPECIAL_PREFIX = b"\xff"  # before the name of a special token; no byte of UTF-8


# The byte that each character stands for in byte-level vocabularies (GPT-2).
BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


def decode_all_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[int, bytes]:
    """Returns the bytes of every token by id; a special token is SPECIAL_PREFIX and its name."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and '"type":"ByteLevel"' in backend.to_str()

    def decode_token(token: str) -> bytes:
        if byte_level and all(character in BYTE_OF_CHARACTER for character in token):
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        if not byte_level and (byte := BYTE_PATTERN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if byte_level:
            return token.encode()
        return token.replace(SENTENCEPIECE_SPACE, " ").encode()

    bytes_by_id = {number: decode_token(token) for token, number in tokenizer.get_vocab().items()}
    for number, added in tokenizer.added_tokens_decoder.items():
        if byte_level or not BYTE_PATTERN.fullmatch(added.content):
            if added.special:
                bytes_by_id[number] = SPECIAL_PREFIX + added.content.encode()
            elif byte_level:
                bytes_by_id[number] = added.content.encode()
            else:
                bytes_by_id[number] = decode_token(added.content)
    return bytes_by_id


@final
@dataclass(frozen=True)
class SharedVocabulary:
    """Tokens that the target and a draft model share, and how the target's others are spelled.

    target, draft: [N] int64, the numbers of the shared tokens, by the target's ascending.
    """

    target: Tensor
    draft: Tensor
    target_bytes: Mapping[int, bytes]
    draft_by_bytes: Mapping[bytes, int]

    @property
    def share(self) -> float:
        """The fraction of the target's tokens that is shared."""
        return len(self.target) / max(len(self.target_bytes), 1)

    @cached_property
    def longest(self) -> int:
        """The length in bytes of the draft model's longest token."""
        return max(map(len, self.draft_by_bytes))

    @cached_property
    def _spelled(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.target.tolist(), ((n,) for n in self.draft.tolist()), strict=True))

    def encode_bytes_of(self, token: int) -> tuple[int, ...]:
        """The draft model's tokens for a token of the target, at least one.

        A shared token is one. Others are spelled by the longest tokens that fit, from the left; a
        special one by its name. A byte that the draft model lacks is left out.
        """
        if token not in self._spelled:
            self._spelled[token] = self._split(self.target_bytes.get(token, b""))
        return self._spelled[token]

    def _split(self, text: bytes) -> tuple[int, ...]:
        text = text.removeprefix(SPECIAL_PREFIX)
        found = list[int]()
        at = 0
        while at < len(text):
            for size in range(min(self.longest, len(text) - at), 0, -1):
                number = self.draft_by_bytes.get(text[at : at + size])
                if number is not None:
                    found.append(number)
                    break
            at += size
        if not found:
            return (int(self.draft[0]),)
        return tuple(found)


def build_shared_vocabulary(
    target: "PreTrainedTokenizerBase",
    draft: "PreTrainedTokenizerBase",
    target_size: int,
    draft_size: int,
) -> SharedVocabulary:
    """Finds the tokens that two tokenizers share. Tokens beyond a model's vocabulary do not count.

    Of several tokens for the same bytes one counts (`index_by_bytes`). Raises InputError where no token
    is shared.
    """
    ours = {n: text for n, text in decode_all_tokens(target).items() if n < target_size}
    theirs = {n: text for n, text in decode_all_tokens(draft).items() if n < draft_size}
    ours_by_bytes = index_by_bytes(target, ours)
    theirs_by_bytes = index_by_bytes(draft, theirs)
    shared = [text for text in ours_by_bytes if text and text in theirs_by_bytes]
    if not shared:
        raise InputError("the two vocabularies share no token")
    pairs = sorted((ours_by_bytes[text], theirs_by_bytes[text]) for text in shared)
    target_ids, draft_ids = torch.tensor(pairs, dtype=torch.int64, device="cpu").unbind(1)
    return SharedVocabulary(target_ids.contiguous(), draft_ids.contiguous(), ours, theirs_by_bytes)


def index_by_bytes(
    tokenizer: "PreTrainedTokenizerBase", table: Mapping[int, bytes]
) -> dict[bytes, int]:
    """The number of the token that stands for some bytes.

    table: the bytes of each token, by its number. Of several tokens for the same bytes it is the
    first, but one like `<0x61>` only where there is no other: a text's `a` is the token `a`.
    """
    names = tokenizer.convert_ids_to_tokens(sorted(table))
    single = [bool(BYTE_PATTERN.fullmatch(name)) for name in names]
    found: dict[bytes, int] = {}
    for _, number in sorted(zip(single, sorted(table), strict=True)):
        found.setdefault(table[number], number)
    return found


def find_token_difference(target: Any, draft: Any, target_size: int, draft_size: int) -> str | None:
    """A difference between two tokenizers' numbering of tokens, or None if they agree.

    A number that only one of them names is padding of the other's embedding, and no difference.
    """
    if draft is None or target is None:
        if draft_size == target_size and draft is target:
            return None
        return f"{draft_size} and {target_size}, without a tokenizer to compare"
    of_target = {number: token for token, number in target.get_vocab().items()}
    of_draft = {number: token for token, number in draft.get_vocab().items()}
    for number in sorted(of_draft.keys() & of_target.keys()):
        if of_draft[number] != of_target[number]:
            return f"token {number} is {of_draft[number]!r}, the target's {of_target[number]!r}"
    return None


def find_start_tokens(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer gives every text at its start; [] without a tokenizer."""
    if tokenizer is None:
        return []
    around = tokenizer.encode("a")
    bare = tokenizer.encode("a", add_special_tokens=False)
    if not bare or bare[0] not in around:
        return []
    return list(around[: around.index(bare[0])])
