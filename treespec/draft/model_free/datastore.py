"""Datastores for retrieval (REST, He et al. 2024, 2311.08252): a corpus as tokens, with a suffix
array, on disk.

A directory holds index.json, tokens.npy [T] and suffixes.npy [T]. `tokens` concatenates the texts
and puts `end`, a number that is no token, after each. Both arrays are memory-mapped: a search reads
only the pages that it touches.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from treespec.draft.model_free.options import ORDER
from treespec.draft.model_free.suffixes import longest_suffix, suffix_array
from treespec.errors import InputError
from treespec.files.atomic import LOCK, TEMPORARY, locked, read_json, write_json, writing
from treespec.text.conversations import read_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from treespec.heads.checksum import Fields

FORMAT = 1
CONVERSATIONS = (".jsonl", ".json")
MOST = 1 << 31  # tokens: a pair of ranks must fit 64 bits
BLOCK = 1 << 16  # characters of plain text encoded as one string, up to the end of a line
BLOCKS = 64
AGAIN = "build it again with treespec datastore build --target TARGET"


@final
@dataclass(frozen=True)
class Datastore:
    """tokens, suffixes: [T]. end: a continuation stops before the first number >= `end`."""

    tokens: np.ndarray
    suffixes: np.ndarray
    end: int

    def continuations(
        self, text: np.ndarray, shortest: int, longest: int, most: int, length: int
    ) -> np.ndarray:
        """[M, length] int64 continuations of the text's longest suffix in the store, -1 after the
        end of a text.

        text: [n] int64. shortest, longest: bounds of the suffix, at most ORDER. most: the largest
        M. Of more matches it takes evenly spaced ones in suffix order, so that each continuation
        keeps its share.
        """
        context = text[-longest:].tolist()
        known, first, last = longest_suffix(
            self.tokens, self.suffixes, context, shortest, min(longest, ORDER)
        )
        if not known:
            return np.empty((0, length), dtype=np.int64)
        matches = np.linspace(first, last - 1, min(last - first, most)).round().astype(np.int64)
        places = self.suffixes[matches].astype(np.int64)[:, None] + known + np.arange(length)
        found = self.tokens[places.clip(max=len(self.tokens) - 1)].astype(np.int64)
        return np.where(np.cumsum(found >= self.end, axis=1) > 0, -1, found)


def fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A digest of the vocabulary: tokens and their numbers."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def build(
    texts: Iterable[list[int]], tokenizer: "PreTrainedTokenizerBase", folder: str | Path
) -> int:
    """Write a datastore and return its number of tokens. It takes some 50 bytes of memory a token.

    A killed build leaves no datastore, because it writes index.json last; the next build overwrites
    its files. Raises InputError if the folder exists, is being built by another process or cannot
    be written, and for no token or more than MOST.
    """
    # 1. Refuse a folder in use, before and after waiting for another build to finish.
    folder = Path(folder)
    refuse_what_is_there(folder)
    with locked(folder):
        try:
            refuse_what_is_there(folder)

            # 2. The two arrays.
            tokens, end = joined(texts, tokenizer)
            arrays = {"tokens": tokens, "suffixes": suffix_array(tokens, ORDER)}
            for name, array in arrays.items():
                with writing(folder / f"{name}.npy") as temporary, temporary.open("wb") as file:
                    np.save(file, array)

            # 3. The index, last.
            index = {
                "format": FORMAT,
                "tokenizer": fingerprint(tokenizer),
                "tokens": len(tokens),
                "end": end,
                "arrays": {name: digest(array) for name, array in arrays.items()},
            }
            write_json(folder / "index.json", index)
        finally:
            tidy(folder)
    return len(tokens)


def refuse_what_is_there(folder: Path) -> None:
    """Raises InputError unless the folder is missing, empty, or left by a killed build."""
    unfinished = {LOCK, "tokens.npy", "suffixes.npy"}
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    names = {name for name in names if not TEMPORARY.fullmatch(name)}
    is_file = folder.exists() and not folder.is_dir()
    left_by_a_build = not names or (LOCK in names and names <= unfinished)
    if is_file or not left_by_a_build:
        raise InputError(f"--out {folder} exists: delete it, or choose another")


def joined(
    texts: Iterable[list[int]], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[np.ndarray, int]:
    """([T] all texts, each followed by `end`; `end`).

    Raises InputError for no token or more than MOST.
    """
    end = max(tokenizer.get_vocab().values()) + 1
    kind = np.uint16 if end < 1 << 16 else np.uint32
    parts = [np.array([*text, end], dtype=kind) for text in texts if text]
    if not parts:
        raise InputError("--data holds no text")
    if (size := sum(map(len, parts))) > MOST:
        raise InputError(f"--data holds {size} tokens, a datastore at most {MOST}: give less")
    return np.concatenate(parts), end


def tidy(folder: Path) -> None:
    """Remove the lock's file, and an unfinished datastore with its folder."""
    whole = (folder / "index.json").exists()
    with suppress(OSError):
        for name in (LOCK,) if whole else (LOCK, "tokens.npy", "suffixes.npy"):
            (folder / name).unlink(missing_ok=True)
        if not whole:
            folder.rmdir()


def digest(array: np.ndarray) -> str:
    """SHA-256 of an array's dtype, shape and content."""
    content = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    content.update(array.data)
    return content.hexdigest()


def open_datastore(
    folder: str | Path, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int
) -> Datastore:
    """A datastore for a target. vocab_size: V of the target, which may lack tokens of its
    tokenizer.

    It reads both arrays once to compare their checksums, which takes about a second a GB.
    Raises InputError for a missing or damaged datastore, and for another format or tokenizer.
    """
    folder = Path(folder)
    index = check_datastore(folder)
    if tokenizer is None or index.get("tokenizer") != fingerprint(tokenizer):
        raise InputError(f"datastore {folder} is of another tokenizer than the target's: {AGAIN}")
    tokens, suffixes = (
        stored(folder / f"{name}.npy", name, index) for name in ("tokens", "suffixes")
    )
    end = index.get("end")
    if type(end) is not int or end < 0:
        raise InputError(f"{folder / 'index.json'} is damaged, its end is {end!r}: {AGAIN}")
    return Datastore(tokens, suffixes, min(end, vocab_size))


def check_datastore(folder: str | Path) -> "Fields":
    """The index of a datastore. Raises InputError if the folder holds none of this format."""
    if not (Path(folder) / "index.json").is_file():
        raise InputError(
            f"no datastore at {folder}: it has no readable index.json; make one with treespec "
            "datastore build"
        )
    return read_json(Path(folder) / "index.json", AGAIN, FORMAT)


def stored(file: Path, name: str, index: "Fields") -> np.ndarray:
    """A memory-mapped array of a datastore. Raises InputError if it differs from the index."""
    try:
        array = np.load(file, mmap_mode="r").view(np.ndarray)
        if array.shape != (index["tokens"],) or array.dtype.kind != "u":
            raise ValueError("it is not of the length that index.json says")
        if index["arrays"][name] != digest(array):
            raise ValueError("its checksum does not match")
    except Exception as error:  # numpy raises anything, depending on the header's bytes
        raise InputError(f"{file} is damaged ({' '.join(str(error).split())}): {AGAIN}") from error
    return array


def encoded(
    file: str | Path,
    tokenizer: "PreTrainedTokenizerBase",
    template: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[list[int]]:
    """The token ids of a file's texts: conversations (.jsonl, .json), or one plain text.

    template: formats the conversations. say: takes lines about the conversations used and left out.
    Raises InputError for a file that cannot be read.
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

    # 2. Plain text: one text, in blocks of lines.
    tokens: list[int] = []
    try:
        with path.open(encoding="utf-8") as lines:
            blocks = iter(lambda: "".join(lines.readlines(BLOCK)), "")
            while some := list(islice(blocks, BLOCKS)):
                for ids in tokenizer(some, add_special_tokens=False, verbose=False)["input_ids"]:
                    tokens += ids
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InputError(f"cannot read --data {path}: {reason}") from error
    yield tokens
