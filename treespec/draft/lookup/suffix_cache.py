"""Suffix caches: the completions so far that `suffix` drafts from, bounded in tokens, by name.

A cache is one array of tokens. On disk it is a file, which names its format and a digest of the tokenizer.
Each completion replaces it, with the folder locked: several processes may add, and a kill loses at most the
completion that is being written.

    FOLDER/shared.safetensors                      the cache without a name
    FOLDER/0f3a9c7be21d4458a6c0e95b.safetensors    a name's, which may be a secret, by its digest
"""

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from treespec.draft.lookup.guess import END_OF_TEXT
from treespec.errors import InputError
from treespec.files.atomic import locked, read_about, read_tensors, write_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUFFIX_CACHE_FORMAT = "2"
MAX_OPEN_CACHES = 256  # caches in memory; the one that was not used for longest leaves it
DELETE_ADVICE = "delete it to forget its answers, or name another folder"
WITHOUT_FOLDER_WARNING = "the suffix cache goes on without its folder: %s"

log = logging.getLogger(__name__)


@final
class SuffixCache:
    """The latest completions, up to a number of tokens, as one array [T] with END after each.

    file: where they are kept, too; None: in memory alone, as from the moment when it cannot be written.
    """

    def __init__(
        self, most: int, file: Path | None = None, tokenizer: str = "", vocab_size: int = 0
    ) -> None:
        """most: tokens to keep. tokenizer: a digest of the target's. vocab_size: of the target.

        Raises InputError for a file that is damaged or of another tokenizer.
        """
        self.most = most
        self.file = file
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.tokens = self._read_stored()

    def add(self, completion: Sequence[int]) -> None:
        """Keep a completion."""
        from torch import from_numpy  # the checks before loading do without torch

        new = np.array([*completion, END_OF_TEXT], dtype=np.int32)
        tokens = self._keep_latest(np.append(self.tokens, new))
        if self.file:
            try:
                with locked(self.file.parent, wait=lambda holder: None):
                    tokens = self._keep_latest(
                        np.append(self._read_stored(), new)
                    )  # others may have added
                    about = {"format": SUFFIX_CACHE_FORMAT, "tokenizer": self.tokenizer}
                    write_tensors(self.file, {"tokens": from_numpy(tokens)}, about)
            except (InputError, OSError) as error:
                log.warning(WITHOUT_FOLDER_WARNING, error)
                self.file = None
        self.tokens = tokens

    def _keep_latest(self, tokens: np.ndarray) -> np.ndarray:
        return tokens[max(len(tokens) - self.most, 0) :]

    def _read_stored(self) -> np.ndarray:
        """The tokens of its file; two models of one tokenizer may have vocabularies of different sizes."""
        if not self.file or not self.file.exists():
            return np.empty(0, dtype=np.int32)
        check_header(self.file, DELETE_ADVICE, self.tokenizer)
        stored = self._keep_latest(read_tensors(self.file, DELETE_ADVICE)[0]["tokens"].numpy())
        return np.where((stored >= 0) & (stored < self.vocab_size), stored, np.int32(END_OF_TEXT))


@final
class SuffixCaches:
    """Caches by name; "" is that of all who name none. None of them sees another's completions.

    root: keeps them on disk; None: they end with the process.
    """

    def __init__(
        self, tokens: int, root: Path | None = None, tokenizer: str = "", vocab_size: int = 0
    ) -> None:
        """tokenizer: a digest of the target's. Raises InputError for files that are of another
        tokenizer or damaged.
        """
        self.tokens = tokens
        self.root = root
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._by_name: OrderedDict[str, SuffixCache] = OrderedDict()
        if root is not None:
            check_cache_files(root, tokenizer)
            self._by_name[""] = self._open_cache("")

    def get_cache(self, name: str) -> SuffixCache:
        """The cache of that name, read from its file when it is first asked for."""
        if name not in self._by_name:
            try:
                self._by_name[name] = self._open_cache(name)
            except InputError as error:  # damaged since it was checked: no request fails by that
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


def check_cache_files(root: Path, tokenizer: str | None = None) -> None:
    """Raises InputError if the root is a file, and as `check_header` does for the caches' files."""
    if root.exists() and not root.is_dir():
        raise InputError(f"the suffix cache {root} is a file: name a folder")
    for file in root.glob("*.safetensors"):
        check_header(file, DELETE_ADVICE, tokenizer)


def check_header(file: Path, remedy: str, tokenizer: str | None = None) -> None:
    """Raises InputError for a damaged file of tokens, another format and another tokenizer.

    tokenizer: `hash_vocabulary` of the target's; None: any.
    """
    about = read_about(file, remedy)
    found = about.get("format")
    if found != SUFFIX_CACHE_FORMAT:
        raise InputError(
            f"{file} has format {found}, this treespec reads {SUFFIX_CACHE_FORMAT}: {remedy}"
        )
    if tokenizer not in (None, about.get("tokenizer")):
        raise InputError(f"{file} is of another tokenizer than the target's: {remedy}")


def hash_vocabulary(tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int = 0) -> str:
    """A digest of the vocabulary, tokens and their numbers. vocab_size: tells without a tokenizer."""
    if tokenizer is None:
        return f"{vocab_size} tokens"
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()
