"""Suffix caches: the completions so far that `suffix` drafts from, bounded in tokens, by name.

On disk a cache is a folder of segments, files that grow by a line for each completion:

    FOLDER/shared/000007.jsonl      a full segment stays as it is
    FOLDER/shared/000008.jsonl      the last one grows

A segment holds an eighth of the bound; the oldest are deleted. Several processes may add, with the
folder locked. A kill loses at most the completion that is being written.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from treespec.draft.model_free.matches import SuffixIndex
from treespec.errors import InputError
from treespec.files.atomic import LOCK, locked
from treespec.files.lines import opened, parsed

NAMES = 256  # caches at a time; the one that was not used for longest is forgotten
SHARED = "shared"  # the folder of the cache without a name
SEGMENTS = 8  # of which the oldest is forgotten as a whole
NUMBERED = "[0-9]" * 6 + ".jsonl"
FORGET = "delete it to forget its answers, or name another folder"
WITHOUT = "the suffix cache goes on without its folder: %s"

log = logging.getLogger(__name__)


def segments(folder: Path) -> list[Path]:
    """The files of a suffix cache, oldest first."""
    return sorted(folder.glob(NUMBERED))


def read(segment: Path, tokenizer: str | None = None) -> list[list[int]]:
    """The completions of a segment. tokenizer: a digest of the target's; None: any.

    Raises InputError for a damaged file, and for another tokenizer's.
    """
    try:
        lines, _ = parsed(segment.read_bytes(), segment)
        completions = [[int(token) for token in line["tokens"]] for line in lines]
        foreign = any(tokenizer not in (None, line["tokenizer"]) for line in lines)
        damaged = min(map(min, completions), default=0) < 0
    except (InputError, LookupError, ValueError, TypeError):
        damaged, foreign = True, False
    if damaged or foreign:
        what = "damaged" if damaged else "of another tokenizer than the target's"
        raise InputError(f"{segment} is {what}: {FORGET}")
    return completions


@final
class SuffixCache:
    """The latest completions, up to a number of tokens, in two halves.

    When the young half is full it becomes the old one, and the old one is forgotten:

        old    a b c d         old    e f g h
        young  e f g h    ->   young  i

    folder: where they are kept, too; None: in memory alone, as from the moment when the folder cannot
    be written.
    """

    def __init__(
        self, tokens: int, folder: Path | None = None, tokenizer: str = "", vocab_size: int = 0
    ) -> None:
        """tokens: the most to keep. tokenizer: a digest of the target's. vocab_size: of the target.

        Completions with a token that the target lacks are left out: two models of one tokenizer may
        be padded to vocabularies of different sizes. Raises InputError as `read` does.
        """
        self.tokens, self.half, self.folder = tokens, max(tokens // 2, 1), folder
        self.tokenizer = tokenizer
        self.young, self.old = SuffixIndex(), SuffixIndex()
        for segment in segments(folder) if folder else ():
            with suppress(FileNotFoundError):  # another process has just forgotten it
                for completion in read(segment, tokenizer):
                    if max(completion) < vocab_size:
                        self._add(completion)

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    @property
    def indexes(self) -> tuple[SuffixIndex, SuffixIndex]:
        return self.young, self.old

    def add(self, completion: Sequence[int]) -> None:
        """Keep a completion."""
        completion = self._add(completion)
        if self.folder and completion:
            try:
                self._write(self.folder, completion)
            except (InputError, OSError) as error:
                log.warning(WITHOUT, error)
                self.folder = None

    def _add(self, completion: Sequence[int]) -> list[int]:
        kept = list(completion[-(self.half - 1) :]) if self.half > 1 else []
        if kept:
            if len(self.young) + len(kept) + 1 > self.half:
                self.young, self.old = SuffixIndex(), self.young
            self.young.extend(kept)
            self.young.end_text()
        return kept

    def _write(self, folder: Path, completion: list[int]) -> None:
        most = max(self.tokens // SEGMENTS, 1)
        kept = completion[-most:]
        with locked(folder, wait=lambda holder: None):
            # 1. To the last segment, or to the next one where it is full.
            files = segments(folder)
            number = int(files[-1].stem) if files else 1
            if files and sum(map(len, read(files[-1], self.tokenizer))) + len(kept) > most:
                number += 1
            with opened(folder / f"{number:06}.jsonl") as lines:
                lines.append({"tokenizer": self.tokenizer, "tokens": kept})

            # 2. The oldest ones are deleted.
            for segment in segments(folder)[:-SEGMENTS]:
                with suppress(OSError):  # the next completion tries it again
                    segment.unlink()


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
        self.tokens, self.root, self._of_target = tokens, root, (tokenizer, vocab_size)
        self._by_name: OrderedDict[str, SuffixCache] = OrderedDict()
        if root is not None:
            for folder in checked_folders(root, tokenizer)[:-NAMES]:
                delete(folder)
            self.named("")  # reading takes up to a second: not amid the first completion

    def named(self, name: str) -> SuffixCache:
        """The cache of that name, read from its folder when it is first asked for."""
        if name not in self._by_name:
            self._by_name[name] = self._begun(name)
        self._by_name.move_to_end(name)
        if len(self._by_name) > NAMES:
            _, forgotten = self._by_name.popitem(last=False)
            if forgotten.folder:
                delete(forgotten.folder)
        return self._by_name[name]

    def _begun(self, name: str) -> SuffixCache:
        if self.root is not None:
            try:
                # A name may be a secret or hold any characters.
                hashed = hashlib.sha256(f"treespec memory {name}".encode()).hexdigest()[:24]
                folder = self.root / (hashed if name else SHARED)
                return SuffixCache(self.tokens, folder, *self._of_target)
            except InputError as error:  # damaged since it was checked: no request fails by that
                log.warning(WITHOUT, error)
        return SuffixCache(self.tokens)


def delete(folder: Path) -> None:
    """Forget all completions, but for those in files that this process may not delete."""
    with suppress(OSError):  # or another process adds to it
        for segment in segments(folder):
            segment.unlink(missing_ok=True)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()


def checked_folders(root: Path, tokenizer: str | None = None) -> list[Path]:
    """The folders of the caches, the one that was written last at the end.

    Raises InputError if the root is a file, and as `read` does.
    """
    if root.exists() and not root.is_dir():
        raise InputError(f"the suffix cache {root} is a file: name a folder")
    written: dict[Path, float] = {}
    for segment in root.glob(f"*/{NUMBERED}"):
        with suppress(FileNotFoundError):  # another process has just forgotten it
            read(segment, tokenizer)
            written[segment.parent] = segment.parent.stat().st_mtime
    return sorted(written, key=written.__getitem__)
