"""The answers so far, by the name of the memory that keeps them, bounded in tokens."""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from treespec.draft.model_free.suffix_files import MemoryFiles
from treespec.draft.model_free.suffix_index import SuffixIndex
from treespec.errors import InputError

NAMES = 256  # memories at a time; the one that was not used for longest is forgotten
SHARED = "shared"  # the folder of the memory without a name
WITHOUT = "the memory goes on without its folder: %s"

log = logging.getLogger(__name__)


@final
class Memory:
    """The latest answers, up to a number of tokens, in two halves.

    When the young half is full it becomes the old one, and the old one is forgotten:

        old    a b c d         old    e f g h
        young  e f g h    ->   young  i
    """

    def __init__(self, tokens: int, files: MemoryFiles | None = None) -> None:
        """tokens: the most to keep. files: where they are kept, too."""
        self.half, self.files = max(tokens // 2, 1), files
        self.young, self.old = SuffixIndex(), SuffixIndex()
        for answer in files.answers() if files else ():
            self._add(answer)

    def __len__(self) -> int:
        return len(self.young) + len(self.old)

    @property
    def indexes(self) -> tuple[SuffixIndex, SuffixIndex]:
        return self.young, self.old

    def add(self, answer: Sequence[int]) -> None:
        """Keep an answer. A folder that cannot be written is left alone from then on."""
        answer = self._add(answer)
        if self.files and answer:
            try:
                self.files.add(answer)
            except (InputError, OSError) as error:
                log.warning(WITHOUT, error)
                self.files = None

    def _add(self, answer: Sequence[int]) -> list[int]:
        kept = list(answer[-(self.half - 1) :]) if self.half > 1 else []
        if not kept:
            return []
        if len(self.young) + len(kept) + 1 > self.half:
            self.young, self.old = SuffixIndex(), self.young
        self.young.extend(kept)
        self.young.end_text()
        return kept


@final
class Memories:
    """Memories by name; "" is that of all who name none. None of them sees another's answers.

    folder: keeps them on disk; None: they end with the process.
    """

    def __init__(
        self, tokens: int, folder: Path | None = None, tokenizer: str = "", vocab_size: int = 0
    ) -> None:
        """tokenizer: a digest of the target's. Raises InputError for files that are of another
        tokenizer or damaged.
        """
        self.tokens, self.folder = tokens, folder
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._by_name: OrderedDict[str, Memory] = OrderedDict()
        if folder is not None:
            for place in places_in(folder):
                self._files_in(place).answers()
            for place in places_in(folder)[:-NAMES]:
                self._files_in(place).delete()
            self.named("")  # reading takes up to a second: not amid the first answer

    def named(self, name: str) -> Memory:
        """The memory of that name, read from its folder when it is first asked for."""
        if name not in self._by_name:
            self._by_name[name] = self._begun(name)
        self._by_name.move_to_end(name)
        if len(self._by_name) > NAMES:
            _, forgotten = self._by_name.popitem(last=False)
            if forgotten.files:
                forgotten.files.delete()
        return self._by_name[name]

    def _begun(self, name: str) -> Memory:
        if self.folder is None:
            return Memory(self.tokens)
        place = self.folder / (digest(name) if name else SHARED)
        try:
            return Memory(self.tokens, self._files_in(place))
        except InputError as error:  # damaged since it was checked: no request fails by that
            log.warning(WITHOUT, error)
            return Memory(self.tokens)

    def _files_in(self, place: Path) -> MemoryFiles:
        return MemoryFiles(place, self.tokens, self._tokenizer, self._vocab_size)


def check_memories(folder: Path) -> None:
    """Raises InputError where a folder's memories cannot be read or are damaged, by their headers."""
    for place in places_in(folder):
        MemoryFiles(place, 0, None, None).check()


def places_in(folder: Path) -> list[Path]:
    """The folders of a folder's memories, the one that was written last at the end.

    Raises InputError for a file.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"the memory {folder} is a file: name a folder")
    written: dict[Path, float] = {}
    for file in folder.glob("*/*.safetensors"):
        with suppress(FileNotFoundError):  # another process has just forgotten it
            written[file.parent] = file.parent.stat().st_mtime
    return sorted(written, key=written.__getitem__)


def digest(name: str) -> str:
    """A folder's name for a memory's, which may be a secret or hold any characters."""
    return hashlib.sha256(f"treespec memory {name}".encode()).hexdigest()[:24]
