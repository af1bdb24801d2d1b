"""A memory on disk: segments of answers, each written whole or not at all.

    FOLDER/shared/000007.safetensors      tokens [T] int32, ends [A] int64 of A answers in T tokens
    FOLDER/shared/000008.safetensors      the last segment grows; a full one stays as it is

A segment holds an eighth of the bound; the oldest are deleted. Several processes may add:
each reads the last segment anew, with the folder locked. A killed one leaves the segment as it was
before its answer, or after it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, final

from treespec.errors import InputError
from treespec.files.atomic import LOCK, locked, read_about, read_tensors, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "1"
SEGMENTS = 8  # of which the oldest is forgotten as a whole
AGAIN = "delete it to forget its answers, or name another folder"


@final
@dataclass(frozen=True)
class MemoryFiles:
    """tokens: the most to keep. tokenizer: a digest of the target's, which every file names; None: any.

    vocab_size: of the target; None: not known yet.
    """

    folder: Path
    tokens: int
    tokenizer: str | None
    vocab_size: int | None

    def answers(self) -> list[list[int]]:
        """The latest answers, oldest first, but for those with a token that the target lacks.

        Two models of one tokenizer may be padded to vocabularies of different sizes. Raises
        InputError for a file of another tokenizer, and for a damaged one.
        """
        found: list[list[int]] = []
        for path in self._segments():
            try:
                tokens, ends = self._read(path)
            except InputError:
                if path.exists():
                    raise
                continue  # another process has just forgotten it
            text, borders = tokens.tolist(), [0, *ends.tolist()]
            found += [text[start:end] for start, end in pairwise(borders)]
        size = self.vocab_size
        return [answer for answer in found if size is None or max(answer) < size]

    def check(self) -> None:
        """Raises InputError as `answers`, as far as the headers of the files tell."""
        for path in self._segments():
            self._check(path, read_about(path, AGAIN))

    def add(self, answer: Sequence[int]) -> None:
        """Append an answer. Raises InputError where the folder cannot be written."""
        import torch

        most = max(self.tokens // SEGMENTS, 1)
        new = torch.tensor(list(answer)[-most:], dtype=torch.int32)
        with locked(self.folder, wait=lambda holder: None):
            # 1. The last segment, or the next one where it is full.
            segments = self._segments()
            number = int(segments[-1].stem) if segments else 1
            tokens, ends = new, torch.tensor([len(new)])
            if segments:
                before, ends_before = self._read(segments[-1])
                if len(before) + len(new) <= most:
                    tokens = torch.cat([before, new])
                    ends = torch.cat([ends_before, ends + len(before)])
                else:
                    number += 1

            # 2. Write it, then delete the oldest ones.
            path = self.folder / f"{number:06}.safetensors"
            about = {"format": FORMAT, "tokenizer": self.tokenizer or ""}
            write_tensors(path, {"tokens": tokens, "ends": ends}, about)
            for segment in self._segments()[:-SEGMENTS]:
                with suppress(OSError):  # the next answer tries it again
                    segment.unlink()

    def delete(self) -> None:
        """Forget all answers, but for those in files that this process may not delete."""
        with suppress(OSError):  # or another process adds to it
            for segment in self._segments():
                segment.unlink(missing_ok=True)
            (self.folder / LOCK).unlink(missing_ok=True)
            self.folder.rmdir()

    def _segments(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]" * 6 + ".safetensors"))

    def _read(self, path: Path) -> tuple["Tensor", "Tensor"]:
        """[T] tokens and [A] ends of a segment."""
        tensors, about = read_tensors(path, AGAIN)
        self._check(path, about)
        tokens, ends = tensors.get("tokens"), tensors.get("ends")
        if tokens is None or ends is None or not self._sound(tokens, ends):
            raise InputError(f"{path} is damaged: {AGAIN}")
        return tokens, ends

    def _check(self, path: Path, about: Mapping[str, str]) -> None:
        if about.get("format") != FORMAT:
            raise InputError(
                f"the memory {path} has format {about.get('format')}, this treespec reads {FORMAT}: "
                f"{AGAIN}"
            )
        if self.tokenizer is not None and about.get("tokenizer") != self.tokenizer:
            raise InputError(
                f"the memory {self.folder} is of another tokenizer than the target's: {AGAIN}"
            )

    def _sound(self, tokens: "Tensor", ends: "Tensor") -> bool:
        """Whether these can be answers."""
        from torch import int32, int64

        flat = tokens.dim() == ends.dim() == 1 and tokens.numel() > 0 and ends.numel() > 0
        if not flat or tokens.dtype != int32 or ends.dtype != int64:
            return False
        rising = bool((ends.diff() > 0).all()) and int(ends[0]) > 0
        return rising and int(tokens.min()) >= 0 and int(ends[-1]) == len(tokens)
