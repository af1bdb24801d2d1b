"""What a run tells while it runs: a bar on a terminal, now and then a line through a pipe, and metrics.jsonl."""

import json
import time
from pathlib import Path
from typing import Any, TextIO, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

LINE_EVERY = 30.0  # seconds between lines where there is no terminal


@final
class Report:
    """Of the main process; the others say nothing. A context, which opens and closes bar and file."""

    def __init__(self, folder: Path, total: int, speaks: bool) -> None:
        console = Console()
        self.folder, self.speaks = folder, speaks
        self.file: TextIO | None = None
        self.lines = speaks and not console.is_terminal
        self.last = time.monotonic()
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
        self.bar = Progress(*columns, console=console, disable=not speaks or self.lines)
        self.task = self.bar.add_task("train", total=total, said="")

    def __enter__(self) -> "Report":
        if self.speaks:
            self.file = (self.folder / "metrics.jsonl").open("a")
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.file:
            self.file.close()

    def step(self, step: int, loss: float, tokens_per_second: float, seconds_left: float) -> None:
        """Show how far it is."""
        minutes, seconds = divmod(round(seconds_left), 60)
        said = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s  {minutes}:{seconds:02d} left"
        self.bar.update(self.task, completed=step, said=said)
        if self.lines and time.monotonic() - self.last >= LINE_EVERY:
            self.last = time.monotonic()
            print(f"step {step}: {said}", flush=True)

    def write(self, line: dict[str, Any]) -> None:
        """Append to metrics.jsonl."""
        if self.file:
            print(json.dumps(line), file=self.file, flush=True)
