"""Datastores for retrieval (REST, He et al. 2024, 2311.08252): a corpus as tokens, with a suffix array.

    tokens     [T] int32, END after each sequence
    suffixes   [T] int32, the positions of `tokens`, sorted by the tokens that follow

Its file names its format and a digest of the tokenizer. It is written whole or not at all, read by
memory mapping, and checked by its checksum: about a second a GB.
"""

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from treespec.errors import InputError
from treespec.files.atomic import read_about, read_tensors, remove_leftovers, write_tensors
from treespec.text.conversations import CONVERSATIONS, read_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT, DATASTORE = "2", "datastore.safetensors"
AGAIN = "build it again with treespec datastore build --target TARGET"
ORDER, SHORTEST = 16, 2  # tokens of a suffix that is looked for, at most and at least
END = -1  # after each of several sequences
MOST = 1 << 31  # tokens: a position must fit 32 bits, a pair of ranks 64
BLOCK = 1 << 16  # characters of plain text encoded as one string, up to the end of a line
BLOCKS = 64


@final
@dataclass(frozen=True)
class Datastore:
    """tokens, suffixes: [T], as in its file. end: tokens from here on are none of the target's."""

    tokens: np.ndarray
    suffixes: np.ndarray
    end: int

    def continuations(self, text: np.ndarray, most: int, length: int) -> np.ndarray:
        """[M, length] int64 continuations of the text's longest suffix in the store, -1 after the
        end of a text.

        text: [n] int64. most: the largest M. Of more matches it takes evenly spaced ones in suffix
        order, so that each continuation keeps its share. A suffix has SHORTEST to ORDER tokens.
        """
        # 1. If a suffix occurs, shorter ones do: a binary search finds the longest.
        lengths = range(SHORTEST, min(ORDER, len(text)) + 1)
        found = bisect_left(lengths, True, key=lambda size: not self.places_of(text[-size:]))
        if not found:
            return np.empty((0, length), dtype=np.int64)
        known = lengths[found - 1]
        ranks = self.places_of(text[-known:])

        # 2. What follows there.
        matches = np.linspace(ranks[0], ranks[-1], min(len(ranks), most)).round().astype(np.int64)
        places = self.suffixes[matches].astype(np.int64)[:, None] + known + np.arange(length)
        following = self.tokens[places.clip(max=len(self.tokens) - 1)].astype(np.int64)
        ended = (following < 0) | (following >= self.end)
        return np.where(np.cumsum(ended, axis=1) > 0, -1, following)

    def places_of(self, pattern: np.ndarray) -> range:
        """The ranks of the suffixes that begin with a pattern of at most ORDER tokens."""
        wanted = pattern.tolist()

        def beginning(place: np.integer) -> list[int]:
            return self.tokens[int(place) : int(place) + len(wanted)].tolist()

        first = bisect_left(self.suffixes, wanted, key=beginning)
        return range(first, bisect_right(self.suffixes, wanted, lo=first, key=beginning))


def suffix_array(tokens: np.ndarray, order: int) -> np.ndarray:
    """[T] int32: positions of a text, sorted by the next `order` tokens; its end sorts first.

    tokens: [T] whole numbers from END. Searches for at most `order` tokens need no finer order.
    """
    padded = np.pad(tokens, (0, order), constant_values=END - 1)
    keys = [padded[ahead : ahead + len(tokens)] for ahead in reversed(range(order))]
    return np.lexsort(keys).astype(np.int32)


def build(
    texts: Iterable[list[int]], tokenizer: "PreTrainedTokenizerBase", folder: str | Path
) -> int:
    """Write a datastore and return its number of tokens. It takes some 50 bytes of memory a token.

    A killed build leaves no datastore. Raises InputError if the folder exists or cannot be written,
    and for no token or more than MOST.
    """
    from torch import from_numpy

    folder = Path(folder)
    refuse_what_is_there(folder)
    parts = [np.array([*text, END], dtype=np.int32) for text in texts if text]
    if not parts:
        raise InputError("--data holds no text")
    if (size := sum(map(len, parts))) > MOST:
        raise InputError(f"--data holds {size} tokens, a datastore at most {MOST}: give less")
    tokens = np.concatenate(parts)
    arrays = {"tokens": tokens, "suffixes": suffix_array(tokens, ORDER)}
    tensors = {name: from_numpy(array) for name, array in arrays.items()}
    about = {"format": FORMAT, "tokenizer": fingerprint(tokenizer)}
    write_tensors(folder / DATASTORE, tensors, about)
    return size


def refuse_what_is_there(folder: Path) -> None:
    """Raises InputError unless the folder is missing, empty, or left by a killed build."""
    remove_leftovers(folder)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"--out {folder} exists: delete it, or choose another")


def open_datastore(
    folder: str | Path, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int
) -> Datastore:
    """A datastore for a target. vocab_size: V of the target, which may lack tokens of its
    tokenizer.

    Raises InputError for a missing or damaged datastore, and for another format or tokenizer.
    """
    file = datastore_file(folder, fingerprint(tokenizer))
    tensors, _ = read_tensors(file, AGAIN)
    arrays = [tensors[name].numpy() for name in ("tokens", "suffixes") if name in tensors]
    if len(arrays) < 2 or any(array.dtype != np.int32 for array in arrays):
        raise InputError(f"{file} is damaged, it lacks tokens or suffixes: {AGAIN}")
    return Datastore(arrays[0], arrays[1], vocab_size)


def datastore_file(folder: str | Path, tokenizer: str | None = None) -> Path:
    """The file of a datastore. Raises InputError for a missing one, and as `check_header` does."""
    file = Path(folder).expanduser() / DATASTORE
    if not file.is_file():
        raise InputError(
            f"no datastore at {folder}: it has no {DATASTORE}; make one with treespec datastore "
            "build"
        )
    check_header(file, AGAIN, tokenizer)
    return file


def check_header(file: Path, remedy: str, tokenizer: str | None = None) -> None:
    """Raises InputError for a damaged file of tokens, another format and another tokenizer.

    tokenizer: `fingerprint` of the target's; None: any.
    """
    about = read_about(file, remedy)
    if (found := about.get("format")) != FORMAT:
        raise InputError(f"{file} has format {found}, this treespec reads {FORMAT}: {remedy}")
    if tokenizer not in (None, about.get("tokenizer")):
        raise InputError(f"{file} is of another tokenizer than the target's: {remedy}")


def fingerprint(tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int = 0) -> str:
    """A digest of the vocabulary, tokens and their numbers. vocab_size: tells without a tokenizer."""
    if tokenizer is None:
        return f"{vocab_size} tokens"
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def encoded(
    file: str | Path,
    tokenizer: "PreTrainedTokenizerBase",
    template: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[list[int]]:
    """The token ids of a file's texts: conversations (.jsonl, .json), or one plain text in UTF-8.

    template: formats the conversations. say: takes lines about the conversations used and left out.
    Raises InputError for a file that holds no conversation.
    """
    from treespec.text.encoding import encode_conversations  # loads torch

    # 1. Conversations: one text each.
    path = Path(file)
    if path.suffix in CONVERSATIONS:
        conversations, found = read_conversations(path)
        say(f"{path}: {found}")
        examples, fitted = encode_conversations(tokenizer, conversations, template, 1 << 62)
        if fitted.left_out:
            say(f"encoded: {fitted}")
        for problem in found.problems + fitted.problems:
            say(f"  {problem}")
        yield from (example.input_ids.tolist() for example in examples)
        return

    # 2. Plain text: one text, in blocks that end with a line where they can.
    blocks = re.findall(rf"(?s).{{1,{BLOCK}}}(?:\n|\Z)|.{{{BLOCK}}}", path.read_text("utf-8"))
    tokens: list[int] = []
    for first in range(0, len(blocks), BLOCKS):
        some = tokenizer(blocks[first : first + BLOCKS], add_special_tokens=False, verbose=False)
        tokens += chain.from_iterable(some["input_ids"])
    yield tokens
