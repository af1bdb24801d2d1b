"""Progress of a run: a bar on a terminal, a line every 30 s in a pipe, and metrics.jsonl."""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from treespec.errors import InputError
from treespec.files.atomic import write_text

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


@final
class Report:
    """Of the main process; the others say nothing. A context, which opens and closes bar and file.

    first: the step that the run goes on from. Lines of later steps are cut: those steps run again.
    """

    def __init__(self, folder: Path, first: int, total: int, speaks: bool) -> None:
        console = Console()
        self.path, self.first, self.speaks = folder / "metrics.jsonl", first, speaks
        self.file: TextIO | None = None
        self.lines = speaks and not console.is_terminal
        self.last = time.monotonic()
        columns = (
            TextColumn("train"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}"),
        )
        self.bar = Progress(*columns, console=console, disable=not speaks or self.lines)
        self.task = self.bar.add_task("train", total=total, completed=first, said="")

    def __enter__(self) -> "Report":
        if self.speaks:
            write_text(
                self.path, "".join(f"{line}\n" for line in lines_until(self.path, self.first))
            )
            self.file = self.path.open("a", encoding="utf-8")
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.file:
            with suppress(OSError):  # what a full disk did not take is in its buffer still
                self.file.close()

    def step(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """Show how far it is."""
        minutes, seconds = divmod(round(seconds_left), 60)
        said = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {minutes}:{seconds:02d} left"
        self.bar.update(self.task, completed=step, said=said)
        if self.lines and time.monotonic() - self.last >= LINE_EVERY:
            self.last = time.monotonic()
            print(f"step {step}: {said}", flush=True)

    def write(self, line: Mapping[str, object]) -> None:
        """Append to metrics.jsonl. Raises InputError where there is no room."""
        try:
            if self.file:
                print(json.dumps(line), file=self.file, flush=True)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror or error}") from error


def lines_until(path: Path, last: int) -> list[str]:
    """The lines of metrics.jsonl up to step `last`, without what a kill left half-written."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return kept
