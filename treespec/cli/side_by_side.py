"""Two decodings of the same answers, side by side and live: one token at a time, and with treespec.

They take turns, a piece each: the side whose own clock is behind goes on. So each shows at any
moment what it would show at that time if it ran alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treespec.errors import InputError
from treespec.files import read_json, write_json
from treespec.identity import identity_of
from treespec.spec import Spec, load
from treespec.stats import figures
from treespec.text.printable import printable

if TYPE_CHECKING:
    from treespec.decode import Piece

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What should I pack for a weekend in the mountains?",
)
TOKENS = 96  # of an answer
DRAFTED = "green"  # as in chat
TITLES = ("one token at a time", "treespec; what it drafted is green")


@final
@dataclass
class Side:
    """An answer so far: (text, drafted) pieces, tokens, forwards of the target and seconds."""

    pieces: list[tuple[str, bool]]
    tokens: int = 0
    cycles: int = 0
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces).strip()

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def compare(target: str, head: str, file: Path) -> None:
    """Answer the questions in both ways, show it, and keep the figures in `file`.

    head: a directory, which drafts together with a memory of the text as in `treespec chat`, or
    `lookup` to draft from the text alone. A whole file of the same models is shown as it is.
    """
    console = Console()
    alone = head == "lookup"
    models = {
        "target": identity_of(target),
        "head": "" if alone else identity_of(head),
        "drafter": "lookup" if alone else "suffix+head",
    }
    rows = kept(file, models)
    if rows is None:
        ours = load(target, drafter=head if alone else f"suffix+head:{head}")
        baseline = ours.baseline()
        for spec in (baseline, ours):
            spec.generate("Hello", max_new_tokens=8)  # measures once, before any clock runs
        rows = [answered(question, (baseline, ours), console) for question in QUESTIONS]
        write_json(file, {"models": models, "rows": rows})
    else:
        console.print(f"answered before: {file}", highlight=False, markup=False, soft_wrap=True)
    console.print(verdict(rows), highlight=False, soft_wrap=True)


def kept(file: Path, models: dict[str, str]) -> list[dict[str, Any]] | None:
    """The rows of an earlier comparison of the same models; None where there is none."""
    try:
        held = read_json(file, "it is made again")
        return list(held["rows"]) if held["models"] == models else None
    except (InputError, KeyError, TypeError):
        return None


def answered(question: str, specs: tuple[Spec, Spec], console: Console) -> dict[str, Any]:
    """Both answers to a question, shown while they come. Returns their texts and figures."""
    prompt = [{"role": "user", "content": question}]
    streams = [spec.stream(prompt, max_new_tokens=TOKENS, seed=0) for spec in specs]
    sides = [Side([]), Side([])]
    console.print(Text(f"\n> {question}", style="bold"))
    with shown(sides, console) as show:
        race(streams, sides, show)
    for side, stream in zip(sides, streams, strict=True):
        side.tokens, side.cycles = stream.stats.new_tokens, stream.stats.cycles
        side.seconds = stream.stats.seconds["total"]
    if not console.is_terminal:
        for title, side in zip(TITLES, sides, strict=True):
            print(f"[{title}]\n{side.text}\n{line_of(side)}", flush=True)
    counted = ("tokens", "cycles", "seconds")
    both = [
        {"text": side.text, **{name: getattr(side, name) for name in counted}} for side in sides
    ]
    return {"question": question, "sides": both}


def race(
    streams: Sequence[Iterator["Piece"]],
    sides: Sequence[Side],
    show: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run the streams to their ends; the next piece is always that of the side that is behind."""
    running = list(zip(streams, sides, strict=True))
    while running:
        turn = min(running, key=lambda pair: pair[1].seconds)
        stream, side = turn
        started = clock()
        piece = next(stream, None)
        side.seconds += clock() - started
        if piece is None:
            running.remove(turn)
            continue
        side.pieces.append((printable(piece.text), piece.drafted))
        side.tokens += len(piece.token_ids)
        show()


@contextmanager
def shown(sides: Sequence[Side], console: Console) -> Iterator[Callable[[], None]]:
    """Two columns that grow. Yields what draws them anew; without a terminal it does nothing."""
    if not console.is_terminal:
        yield lambda: None
        return
    with Live(table_of(sides), console=console, auto_refresh=False) as live:

        def show() -> None:
            live.update(table_of(sides), refresh=True)

        yield show
        show()


def table_of(sides: Sequence[Side]) -> Table:
    """The answers in two columns, each with its figures."""
    table = Table.grid(expand=True, padding=(0, 2))
    for _ in sides:
        table.add_column(ratio=1)
    table.add_row(*(Text(title, style="dim") for title in TITLES))
    table.add_row(*(coloured(side) for side in sides))
    table.add_row(*(Text(line_of(side), style="dim") for side in sides))
    return table


def coloured(side: Side) -> Text:
    """The answer so far, with what was drafted in colour."""
    text = Text()
    for words, drafted in side.pieces:
        text.append(words, style=DRAFTED if drafted else "")
    return text


def line_of(side: Side) -> str:
    """The figures of a finished answer; the speed of one that goes on."""
    if side.cycles:
        return figures(side.tokens, side.cycles, side.seconds)
    return f"{side.speed:.1f} tokens/s"


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """How much faster all answers came, and whether they are the same."""
    # 1. Tokens per second of each side.
    sides = [[row["sides"][number] for row in rows] for number in (0, 1)]
    plain, drafting = (
        sum(side["tokens"] for side in answers) / sum(side["seconds"] for side in answers)
        for answers in sides
    )

    # 2. The texts.
    same = sum(a["text"] == b["text"] for a, b in zip(*sides, strict=True))
    texts = f"{same} of {len(rows)} texts are the same"
    if same < len(rows):
        texts += "; where they part, two tokens are equally likely up to rounding"
    times = f"{drafting / plain:.2f} times as fast"
    speeds = f"{drafting:.1f} tokens/s with treespec, {plain:.1f} without: {times}"
    return f"\n{speeds}; {texts}\n"
