"""Datastores for retrieval (REST, He et al. 2024, 2311.08252): much text as tokens, with a suffix array, on disk.

A directory of index.json, tokens.npy [T] and suffixes.npy [T]. The texts stand one behind another, each with `end`
behind it, a number that is no token. Both arrays are mapped into memory, so that only what a search touches is read.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, final

import numpy as np

from treespec.conversations import encode_conversations, read_conversations
from treespec.errors import InputError
from treespec.suffixes import longest_suffix, suffix_array

FORMAT = 1
ORDER = 16  # tokens that suffixes are sorted by: the longest that are searched for
CONVERSATIONS = (".jsonl", ".json")
MOST = 1 << 31  # tokens: pairs of ranks are 64-bit numbers
BLOCK = 1 << 16  # characters of plain text that are encoded at once, to the end of a line
BLOCKS = 64
AGAIN = "build it again with treespec datastore build --target TARGET"


@final
@dataclass(frozen=True)
class Datastore:
    """tokens, suffixes: [T]. end: a continuation goes on to the first number that is not below it."""

    tokens: np.ndarray
    suffixes: np.ndarray
    end: int

    def continuations(self, text: np.ndarray, shortest: int, longest: int, most: int, length: int) -> np.ndarray:
        """[M, length] int64 what follows the text's longest suffix that is found, -1 behind the end of a text.

        text: [n] int64. shortest, longest: tokens of a suffix, ORDER at most. most: bounds M; of more matches as many
        are taken evenly from the order of the suffixes, so that each continuation keeps its share.
        """
        context = text[-longest:].tolist()
        known, first, last = longest_suffix(self.tokens, self.suffixes, context, shortest, min(longest, ORDER))
        if not known:
            return np.empty((0, length), dtype=np.int64)
        matches = np.linspace(first, last - 1, min(last - first, most)).round().astype(np.int64)
        places = self.suffixes[matches].astype(np.int64)[:, None] + known + np.arange(length)
        found = self.tokens[places.clip(max=len(self.tokens) - 1)].astype(np.int64)
        return np.where(np.cumsum(found >= self.end, axis=1) > 0, -1, found)


def fingerprint(tokenizer: Any) -> str:
    """A digest of which token has which number."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def build(texts: Iterable[list[int]], tokenizer: Any, folder: str | Path) -> int:
    """Write a datastore and return its number of tokens. The suffix array takes some 50 bytes of memory a token.

    All is written in a directory beside it, which is renamed in the end, so that a kill leaves nothing half.
    Raises InputError where the folder exists or cannot be written, and for no token or more than MOST.
    """
    folder = Path(folder)
    if folder.exists():
        raise InputError(f"--out {folder} exists: delete it, or choose another")
    end = max(tokenizer.get_vocab().values()) + 1
    kind = np.uint16 if end < 1 << 16 else np.uint32
    parts = [np.array([*text, end], dtype=kind) for text in texts if text]
    if not parts:
        raise InputError("--data holds no text")
    if (size := sum(map(len, parts))) > MOST:
        raise InputError(f"--data holds {size} tokens, a datastore at most {MOST}: give less")
    tokens = np.concatenate(parts)
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    index = {"format": FORMAT, "tokenizer": fingerprint(tokenizer), "tokens": len(tokens), "end": end}
    try:
        temporary.mkdir(parents=True)
        np.save(temporary / "tokens.npy", tokens)
        np.save(temporary / "suffixes.npy", suffix_array(tokens, ORDER))
        (temporary / "index.json").write_text(json.dumps(index, indent=2) + "\n")
        os.rename(temporary, folder)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return len(tokens)


def open_datastore(folder: str | Path, tokenizer: Any, vocab_size: int) -> Datastore:
    """vocab_size: V of the target, which may lack tokens of its tokenizer.

    Raises InputError for what is no datastore, or one of another format or tokenizer.
    """
    folder = Path(folder)
    try:
        index = json.loads((folder / "index.json").read_text())
        form, vocabulary = index["format"], index["tokenizer"]
    except OSError as error:
        raise InputError(
            f"no datastore at {folder}: it has no readable index.json; make one with treespec datastore build"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'index.json'} is not understood: {AGAIN}") from error
    if form != FORMAT:
        raise InputError(f"datastore {folder} has format {form}, this treespec reads {FORMAT}: {AGAIN}")
    if tokenizer is None or vocabulary != fingerprint(tokenizer):
        raise InputError(f"datastore {folder} is of another tokenizer than the target's: {AGAIN}")
    try:
        arrays = [np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "suffixes")]
        if {array.shape for array in arrays} != {(index["tokens"],)}:
            raise ValueError("its arrays are not of the length that index.json says")
        end = min(index["end"], vocab_size)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"datastore {folder} is damaged ({error}): {AGAIN}") from error
    tokens, suffixes = (array.view(np.ndarray) for array in arrays)
    return Datastore(tokens, suffixes, end)


def encoded(file: str | Path, tokenizer: Any, template: str | None = None) -> Iterator[list[int]]:
    """The tokens of the texts of a file: of conversations (.jsonl, .json) by the template, of any other its own text.

    Plain text is one text, encoded in blocks of lines. Raises InputError for what cannot be read.
    """
    path = Path(file)
    if path.suffix in CONVERSATIONS:
        examples, _ = encode_conversations(tokenizer, read_conversations(path)[0], template, 1 << 62)
        yield from (example.input_ids.tolist() for example in examples)
        return
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
