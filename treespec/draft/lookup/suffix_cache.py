"""Suffix caches keep the latest completions, up to a number of tokens, for `suffix` to draft from.

A cache has a name and is one array of tokens. Two completions, a b and c d, in a cache of five tokens: the oldest
token goes when the second one is added, and E is END_OF_TEXT:

    add(a b)    a b E
    add(c d)    b E c d E

On disk a cache is a file, which holds its format and a digest of the tokenizer. A thread of its own writes what was
added since the last time, in one go, while the folder is locked: several processes may add, and no answer waits for
the disk or the lock. While another process holds the lock, the thread tries again and again, a second each. A kill
loses what was added since the last write, a fifth of a second or so.

    FOLDER/shared.safetensors                      the cache without a name
    FOLDER/0f3a9c7be21d4458a6c0e95b.safetensors    a named cache: a digest, because a name may be a secret
"""

import hashlib
import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, final
from weakref import finalize

import numpy as np

from treespec.draft.lookup.guess import END_OF_TEXT
from treespec.errors import InputError
from treespec.files.atomic import Locked, locked, read_about, read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIX_CACHE_FORMAT = "2"
MAX_OPEN_CACHES = 256  # caches in memory; the least recently used one is dropped
BATCH_SECONDS = 0.2  # between two writes
LOCK_SECONDS = 1.0  # the longest wait for another process at a time
MAX_UNWRITTEN = 1024  # completions that wait for another process; the oldest are not stored
DELETE_ADVICE = "delete it to forget its answers, or name another folder"
WITHOUT_FOLDER_WARNING = "the suffix cache goes on without its folder: %s"

log = logging.getLogger(__name__)


@final
class SuffixCache:
    """Holds the latest completions, up to a number of tokens, as one array with END_OF_TEXT after each.

    Attributes:
        tokens: [T] int32.
        file: a backing file; None: without one. A failed write sets it to None.
    """

    def __init__(
        self, most: int, file: Path | None = None, tokenizer: str = "", vocab_size: int = 0
    ) -> None:
        """Reads the file, if there is one.

        Args:
            most: the largest number of tokens to keep.
            file: the backing file.
            tokenizer: a digest of the target's tokenizer (`hash_vocabulary`).
            vocab_size: the target's; other tokens of the file are replaced by END_OF_TEXT.

        Raises:
            InputError: the file is damaged or belongs to another tokenizer.
        """
        self.most = most
        self.file = file
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.tokens = self._read_stored()
        self._changing = Lock()  # guards `tokens` and `_unwritten`
        # What is not in the file yet: the latest completions only.
        self._unwritten: deque[np.ndarray] = deque(maxlen=MAX_UNWRITTEN)
        self._writing = Lock()  # one thread writes at a time

    def add(self, completion: Sequence[int]) -> None:
        """Adds a completion in memory; `write` adds it to the file."""
        new = np.array([*completion, END_OF_TEXT], dtype=np.int32)
        with self._changing:
            self.tokens = self._keep_latest(np.append(self.tokens, new))
            if self.file:
                self._unwritten.append(new)

    def write(self) -> bool:
        """Adds new completions to the file. Returns False if another process has held the folder's lock too long.

        Completions that other processes have added join the cache. If the file cannot be written, the cache goes on
        without it.
        """
        from torch import from_numpy  # imported late: checks before loading must not load torch

        with self._writing:
            if not self.file or not self._unwritten:
                return True
            try:
                with locked(self.file.parent, seconds=LOCK_SECONDS):
                    stored = self._read_stored()
                    with self._changing:
                        new = list(self._unwritten)
                    tokens = self._keep_latest(np.concatenate([stored, *new]))
                    about = {"format": SUFFIX_CACHE_FORMAT, "tokenizer": self.tokenizer}
                    write_tensors(self.file, {"tokens": from_numpy(tokens)}, about)
            except Locked:
                return False
            except (InputError, OSError) as error:
                log.warning(WITHOUT_FOLDER_WARNING, error)
                self.file = None
                return True
            with self._changing:  # more may have been added meanwhile
                written = set(map(id, new))
                later = [part for part in self._unwritten if id(part) not in written]
                self._unwritten = deque(later, MAX_UNWRITTEN)
                self.tokens = self._keep_latest(np.concatenate([tokens, *self._unwritten]))
        return True

    def _keep_latest(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[max(len(tokens) - self.most, 0) :]

    def _read_stored(self) -> np.ndarray:
        """Reads the tokens of the file. Two models with one tokenizer may have different vocabulary sizes."""
        if not self.file or not self.file.exists():
            return np.empty(0, dtype=np.int32)
        check_header(self.file, DELETE_ADVICE, self.tokenizer)
        stored = self._keep_latest(read_tensors(self.file, DELETE_ADVICE)[0]["tokens"].numpy())
        return np.where((stored >= 0) & (stored < self.vocab_size), stored, np.int32(END_OF_TEXT))


@final
class SuffixCaches:
    """Suffix caches by name, which share no completions. Requests without a name use the cache "".

    Attributes:
        root: the folder that holds their files; None: they exist only in memory.
    """

    def __init__(
        self, tokens: int, root: Path | None = None, tokenizer: str = "", vocab_size: int = 0
    ) -> None:
        """Checks the files of a folder.

        Args:
            tokens: the largest number of tokens of each cache.
            root: the folder of the caches' files.
            tokenizer: a digest of the target's tokenizer (`hash_vocabulary`).
            vocab_size: the target's.

        Raises:
            InputError: a file is damaged or belongs to another tokenizer.
        """
        self.tokens = tokens
        self.root = root
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._by_name: OrderedDict[str, SuffixCache] = OrderedDict()
        self._unwritten: dict[SuffixCache, None] = {}  # caches whose files lack completions
        self._changing = Lock()  # guards what is unwritten, and whether a thread writes
        self._is_writing = False
        if root is not None:
            finalize(self, write_caches, self._unwritten)  # at the end of the process, too
            check_cache_files(root, tokenizer)
            self._by_name[""] = self._open_cache("")

    def add(self, name: str, completion: Sequence[int]) -> None:
        """Adds a completion to the cache of a name. A thread soon writes it to the file, with others."""
        cache = self.get_cache(name)
        cache.add(completion)
        if cache.file is None:
            return
        with self._changing:
            self._unwritten[cache] = None
            if not self._is_writing:
                self._is_writing = True
                Thread(target=self._write_batches, name="treespec-suffixes", daemon=True).start()

    def flush(self) -> None:
        """Writes what has been added, unless another process holds the folder's lock for longer than a second."""
        write_caches(self._unwritten)

    def _write_batches(self) -> None:
        """Writes batch after batch, until nothing is left to write."""
        while True:
            time.sleep(BATCH_SECONDS)
            with self._changing:
                if not self._unwritten:
                    self._is_writing = False
                    return
            write_caches(self._unwritten)

    def get_cache(self, name: str) -> SuffixCache:
        """Returns the cache of a name; the first call reads its file."""
        if name not in self._by_name:
            try:
                self._by_name[name] = self._open_cache(name)
            except (
                InputError
            ) as error:  # damaged since it was checked: no request fails because of it
                log.warning(WITHOUT_FOLDER_WARNING, error)
                self._by_name[name] = SuffixCache(self.tokens)
        self._by_name.move_to_end(name)
        if len(self._by_name) > MAX_OPEN_CACHES:
            self._by_name.popitem(last=False)
        return self._by_name[name]

    def _open_cache(self, name: str) -> SuffixCache:
        stem = "shared"
        if name:
            stem = hashlib.sha256(f"treespec memory {name}".encode()).hexdigest()[:24]
        file = None
        if self.root:
            file = self.root / f"{stem}.safetensors"
        return SuffixCache(self.tokens, file, self.tokenizer, self.vocab_size)


def write_caches(caches: dict[SuffixCache, None]) -> None:
    """Writes caches, and removes them from `caches`, until another process holds the folder's lock."""
    for cache in list(caches):
        caches.pop(cache, None)  # first: more may be added meanwhile
        if not cache.write():
            caches[cache] = None
            return


def check_cache_files(root: Path, tokenizer: str | None = None) -> None:
    """Raises InputError if the root is a file, or if `check_header` does for a cache's file."""
    if root.exists() and not root.is_dir():
        raise InputError(f"the suffix cache {root} is a file: name a folder")
    for file in root.glob("*.safetensors"):
        check_header(file, DELETE_ADVICE, tokenizer)


def check_header(file: Path, remedy: str, tokenizer: str | None = None) -> None:
    """Raises InputError for a damaged file, another format or another tokenizer.

    remedy: the advice at the end of the message. tokenizer: `hash_vocabulary` of the target's; None: any.
    """
    about = read_about(file, remedy)
    file_format = about.get("format")
    if file_format != SUFFIX_CACHE_FORMAT:
        raise InputError(
            f"{file} has format {file_format}, this treespec reads {SUFFIX_CACHE_FORMAT}: {remedy}"
        )
    if tokenizer not in (None, about.get("tokenizer")):
        raise InputError(f"{file} is of another tokenizer than the target's: {remedy}")


def hash_vocabulary(tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int = 0) -> str:
    """Returns a digest of a tokenizer's tokens and their ids; without a tokenizer, of the vocabulary size."""
    if tokenizer is None:
        return f"{vocab_size} tokens"
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
