"""Datastores of texts for `rest`, which finds in them what followed the longest suffix of a sequence.

All tokens but END_OF_TEXT, E, are sorted by the tokens before them, the nearest first. Tokens after equal contexts
are then neighbours, and a binary search finds them. Two texts, a b and c b a:

    slot      0 1 2 3 4 5 6        slot   token   before it, nearest first
    tokens    a b E c b a E        0      a
                                   3      c       E b a
    slots     0 3 1 5 4            1      b       a
                                   5      a       b c E        a sequence that ends with c b:
                                   4      b       c E b a      slot 5, where a follows

Searching five million tokens takes a tenth of a millisecond, fifty times less than a pass over all tokens.

On disk a datastore is FOLDER/datastore.safetensors, which holds its format, that of a suffix cache, and a digest of
the tokenizer.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from treespec.draft.lookup.guess import END_OF_TEXT
from treespec.draft.lookup.suffix_cache import SUFFIX_CACHE_FORMAT, check_header
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.files.atomic import read_tensors, write_tensors

DATASTORE_FILE = "datastore.safetensors"
REBUILD_ADVICE = "build it again with treespec datastore build"
LONGEST_CONTEXT = 16  # tokens before a slot that it is sorted by, and longest suffix to look for
MAX_DATASTORE_TOKENS = 2**31 - 1  # slots are int32


@final
@dataclass(frozen=True)
class Datastore:
    """Holds texts and their sorted slots.

    Attributes:
        tokens: [T] int32, with END_OF_TEXT after each text.
        slots: [M] int32, all slots but those of END_OF_TEXT, sorted by the LONGEST_CONTEXT tokens before them.
        vocab_size: V of the target. A continuation ends before a token that is not the target's.
    """

    tokens: np.ndarray
    slots: np.ndarray
    vocab_size: int

    def find_longest_match(self, context: np.ndarray, longest: int) -> tuple[int, np.ndarray]:
        """Finds the longest suffix of the context that occurs in the texts with a token after it.

        Args:
            context: [C] the tokens of the sequence so far.
            longest: the largest length to compare, at most LONGEST_CONTEXT.

        Returns:
            The length of the suffix, 0 without a match, and [N] slots of the tokens after its occurrences.
        """
        # 1. The longest match is a neighbour of the place where the context would be sorted in.
        wanted = context[: -longest - 1 : -1].tolist()
        place = bisect_left(self.slots, wanted, key=lambda slot: self._list_before(slot, longest))
        length = 0
        for slot in self.slots[max(place - 1, 0) : place + 1]:
            length = max(length, count_common(wanted, self._list_before(slot, longest)))
        if not length:
            return 0, self.slots[:0]

        # 2. The slots with the same tokens before them.
        suffix = wanted[:length]
        first = bisect_left(self.slots, suffix, key=lambda slot: self._list_before(slot, length))
        end = bisect_right(self.slots, suffix, key=lambda slot: self._list_before(slot, length))
        return length, self.slots[first:end]

    def _list_before(self, slot: np.int32, count: int) -> list[int]:
        """Lists up to `count` tokens before a slot, the nearest first."""
        return self.tokens[max(slot - count, 0) : slot][::-1].tolist()

    def list_continuations(self, slots: np.ndarray, tokens: int) -> list[list[int]]:
        """Lists `tokens` tokens from each slot on. A text's end is END_OF_TEXT; tokens of other texts may follow it."""
        places = slots[:, None].astype(np.int64) + np.arange(tokens)
        continuations = self.tokens.take(places, mode="clip")  # the last token is END_OF_TEXT
        return np.where(continuations < self.vocab_size, continuations, END_OF_TEXT).tolist()


def count_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Counts the first tokens that two sequences have in common."""
    count = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        count += 1
    return count


def sort_slots(tokens: np.ndarray) -> np.ndarray:
    """Sorts all slots but those of END_OF_TEXT by the LONGEST_CONTEXT tokens before them, the nearest first.

    Five million tokens take seven seconds. tokens: [T] int32, with END_OF_TEXT after each text. Returns [M] int32.
    """
    padded = np.pad(tokens, (LONGEST_CONTEXT, 0), constant_values=END_OF_TEXT)
    keys = [padded[start : start + len(tokens)] for start in range(LONGEST_CONTEXT)]
    slots = np.lexsort(keys)  # the last key, the token just before a slot, counts first
    return slots[tokens[slots] != END_OF_TEXT].astype(np.int32)


def build_datastore(texts: Sequence[Sequence[int]], vocab_size: int) -> Datastore:
    """Builds a datastore in memory. It needs 30 bytes a token meanwhile.

    texts: the tokens of each text. vocab_size: V of the target.

    Raises:
        InputError: there is no token, or too many.
    """
    parts = [np.array([*text, END_OF_TEXT], dtype=np.int32) for text in texts if len(text)]
    size = sum(map(len, parts))
    if not size:
        raise InputError("a datastore needs texts, there are none")
    if size > MAX_DATASTORE_TOKENS:
        raise InputError(f"{size} tokens: a datastore holds {MAX_DATASTORE_TOKENS} at most")
    tokens = np.concatenate(parts)
    return Datastore(tokens, sort_slots(tokens), vocab_size)


def write_datastore(store: Datastore, file: Path, tokenizer: str) -> None:
    """Writes a datastore, whole or not at all. tokenizer: `hash_vocabulary` of the target's. Raises InputError."""
    from torch import from_numpy  # imported late: checks before loading must not load torch

    tensors = {"tokens": from_numpy(store.tokens), "slots": from_numpy(store.slots)}
    write_tensors(file, tensors, {"format": SUFFIX_CACHE_FORMAT, "tokenizer": tokenizer})


def open_datastore(place: str, tokenizer: str, vocab_size: int) -> Datastore:
    """Reads a datastore.

    Args:
        place: its file, or the folder of that.
        tokenizer: `hash_vocabulary` of the target's.
        vocab_size: V of the target.

    Raises:
        InputError: it is missing or damaged, or belongs to another tokenizer.
    """
    file = find_datastore_file(place)
    check_header(file, REBUILD_ADVICE, tokenizer)
    tensors, _ = read_tensors(file, REBUILD_ADVICE)
    if tensors.keys() != {"tokens", "slots"}:
        raise InputError(f"{file} is no datastore: {REBUILD_ADVICE}")
    return Datastore(tensors["tokens"].numpy(), tensors["slots"].numpy(), vocab_size)


def find_datastore_file(place: str) -> Path:
    """Finds the file of a datastore. place: the file, or its folder. Raises InputError if it is missing."""
    path = Path(place).expanduser()
    if path.is_dir():
        path = path / DATASTORE_FILE
    if not path.is_file():
        raise InputError(f"no datastore {path}: build one with treespec datastore build")
    return path


def check_datastore(spec: DrafterSpec, target: str) -> None:
    """Checks the file of `--drafter rest:PLACE` before torch loads. Raises InputError if it cannot be read."""
    check_header(find_datastore_file(spec.place), REBUILD_ADVICE)
