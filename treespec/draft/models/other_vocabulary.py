"""A draft model of another vocabulary, and the tokens that it shares with the target.

Tokens are compared by the bytes of text that each stands for.

    byte-level BPE (GPT-2, Llama 3, Qwen)    `Ġthe` stands for ` the`, `Ċ` for a line break
    SentencePiece (Llama 2, Gemma)           `▁the` stands for ` the`, `<0x0A>` for a line break

Special tokens stand for no text: two of them are the same if their names are.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from treespec.draft.models.model import ModelProposer
from treespec.errors import InputError
from treespec.model.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte that no other token holds, in SentencePiece
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
SPECIAL = b"\xff"  # before the name of a special token; no byte of UTF-8


# The byte that each character stands for in byte-level vocabularies (GPT-2).
BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def bytes_of(tokenizer: "PreTrainedTokenizerBase") -> dict[int, bytes]:
    """The bytes of every token, by its number; a special token's name follows SPECIAL."""
    # 1. Tokens beside the model's own: special ones, and plain text.
    found: dict[int, bytes] = {}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and '"type":"ByteLevel"' in backend.to_str()
    for number, added in tokenizer.added_tokens_decoder.items():
        if not byte_level and BYTE.fullmatch(added.content):
            continue
        plain = added.content if byte_level else added.content.replace(SPACE, " ")
        found[number] = SPECIAL + added.content.encode() if added.special else plain.encode()

    # 2. The model's own.
    for token, number in tokenizer.get_vocab().items():
        if number not in found:
            found[number] = _byte_level(token) if byte_level else _sentence_piece(token)
    return found


def _byte_level(token: str) -> bytes:
    if all(character in BYTES for character in token):
        return bytes(BYTES[character] for character in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    if byte := BYTE.fullmatch(token):
        return bytes.fromhex(byte[1])
    return token.replace(SPACE, " ").encode()


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
        """Of the target's tokens."""
        return len(self.target) / max(len(self.target_bytes), 1)

    @cached_property
    def longest(self) -> int:
        """Bytes of the draft model's longest token."""
        return max(map(len, self.draft_by_bytes))

    @cached_property
    def _spelled(self) -> dict[int, tuple[int, ...]]:
        return dict(zip(self.target.tolist(), ((n,) for n in self.draft.tolist()), strict=True))

    def spelled(self, token: int) -> tuple[int, ...]:
        """The draft model's tokens for a token of the target, at least one.

        A shared token is one. Others are spelled by the longest tokens that fit, from the left; a
        special one by its name. A byte that the draft model lacks is left out.
        """
        if token not in self._spelled:
            self._spelled[token] = self._split(self.target_bytes.get(token, b""))
        return self._spelled[token]

    def _split(self, text: bytes) -> tuple[int, ...]:
        text, found, at = text.removeprefix(SPECIAL), list[int](), 0
        while at < len(text):
            for size in range(min(self.longest, len(text) - at), 0, -1):
                number = self.draft_by_bytes.get(text[at : at + size])
                if number is not None:
                    found.append(number)
                    break
            at += size
        return tuple(found) or (int(self.draft[0]),)


def shared_vocabulary(
    target: "PreTrainedTokenizerBase",
    draft: "PreTrainedTokenizerBase",
    target_size: int,
    draft_size: int,
) -> SharedVocabulary:
    """What two tokenizers share. Tokens beyond a model's vocabulary do not count.

    Of several tokens for the same bytes one counts (`by_bytes`). Raises InputError where no token
    is shared.
    """
    ours = {n: text for n, text in bytes_of(target).items() if n < target_size}
    theirs = {n: text for n, text in bytes_of(draft).items() if n < draft_size}
    ours_by_bytes, theirs_by_bytes = by_bytes(target, ours), by_bytes(draft, theirs)
    shared = [text for text in ours_by_bytes if text and text in theirs_by_bytes]
    if not shared:
        raise InputError("the two vocabularies share no token")
    pairs = sorted((ours_by_bytes[text], theirs_by_bytes[text]) for text in shared)
    numbers, own = torch.tensor(pairs).unbind(1)
    return SharedVocabulary(numbers.contiguous(), own.contiguous(), ours, theirs_by_bytes)


def by_bytes(tokenizer: "PreTrainedTokenizerBase", table: Mapping[int, bytes]) -> dict[bytes, int]:
    """The number of the token that stands for some bytes.

    table: the bytes of each token, by its number. Of several tokens for the same bytes it is the
    first, but one like `<0x61>` only where there is no other: a text's `a` is the token `a`.
    """
    numbers = sorted(table)
    names = tokenizer.convert_ids_to_tokens(numbers)
    single = [bool(BYTE.fullmatch(name)) for name in names]
    found: dict[bytes, int] = {}
    for _, number in sorted(zip(single, numbers, strict=True)):
        found.setdefault(table[number], number)
    return found


@final
class OtherVocabulary(ModelProposer):
    """Drafts the tokens that a model of another tokenizer shares with the target.

    Timor et al. 2025 (2502.05202), token-level intersection. The model's distribution is restricted to
    these tokens, and renormalised, before anything is drawn. So it is an ordinary draft distribution
    over a part of the target's vocabulary, and every verifier and tree stays lossless.

    The draft model reads the target's text token by token: a shared token as its own, any other one as
    the tokens that spell its bytes. Three tokens, of which the draft model lacks the second:

        target    the     ·unhappiness       ·of         ends  2 5 6: draft tokens up to each
        draft     <bos>  the  ·un happi ness  ·of

    So its cache stays valid while the text grows, unlike after tokenising the text again.

    known: also the start that the model's tokenizer gives every text. ends: how many of them there
    are up to each observed token of the target.
    """

    per_text = ("known", "ends", "cache")

    def __init__(self, model: Target, target: Target, words: SharedVocabulary) -> None:
        super().__init__(model, target)
        self.words = words
        self.shared = words.target.to(target.output_device)
        self.own = words.draft.to(model.output_device)
        start = start_of(model.tokenizer)
        self.start = self.known[0].new_tensor(start)
        self.skipped = frozenset(start_of(target.tokenizer) if start else ())  # as a first token
        self.known: list[Tensor] = [self.start]
        self.ends: list[list[int]] = [[]]

    @property
    def name(self) -> str:
        return "model of another vocabulary"

    @property
    def vocabulary(self) -> Tensor | None:
        return self.shared

    @property
    def identity(self) -> object:
        return [super().identity, len(self.shared)]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        spelled = [self.spelled(row, new[:-1]) for row, new in enumerate(tokens)]
        starts = list(map(len, self.known))
        super().observe(features, tokens)
        for ends, start, parts in zip(self.ends, starts, spelled, strict=True):
            ends += [*accumulate(map(len, parts), initial=start)][1:]

    def translated(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        parts = [self.spelled(row, new) for row, new in enumerate(tokens)]
        return [self.start.new_tensor([*chain.from_iterable(row)]) for row in parts]

    def spelled(self, row: int, tokens: Tensor) -> list[tuple[int, ...]]:
        """The draft tokens of each of a sequence's next tokens [n]."""
        numbers = tokens.tolist()
        spelled = [self.words.spelled(number) for number in numbers]
        if numbers and not self.ends[row] and numbers[0] in self.skipped:
            spelled[0] = ()
        return spelled

    def rewind(self, lengths: Sequence[int]) -> None:
        self.ends = [ends[:length] for ends, length in zip(self.ends, lengths, strict=True)]
        super().rewind([ends[-1] if ends else len(self.start) for ends in self.ends])

    def cut(self) -> None:
        super().cut()
        # `begin` reads at least one token, and the first root may be one that only the target has.
        lengths = zip(self.cache.lengths, self.ends, strict=True)
        self.cache.rewind([length if ends else 0 for length, ends in lengths])

    def drafted(self, tokens: Tensor) -> Tensor:
        return self.own[tokens]

    def fitted(self, logits: Tensor) -> Tensor:
        return logits.index_select(-1, self.own)


def start_of(tokenizer: object) -> list[int]:
    """The special tokens that a tokenizer gives every text at its start."""
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        return []
    around, bare = encode("a"), encode("a", add_special_tokens=False)
    return list(around[: around.index(bare[0])]) if bare and bare[0] in around else []
