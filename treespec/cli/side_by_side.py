"""Two decodings of the same completions, side by side and live: one token at a time, and with drafts.

They take turns, a piece each: the side whose own clock is behind goes on. So each shows at any
moment what it would show at that time if it ran alone.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treespec.api.spec import Spec
from treespec.decoding.stats import TAU, Stats, figures_of
from treespec.text.prefix import common_prefix
from treespec.text.printable import printable

if TYPE_CHECKING:
    from treespec.decoding.sequence import Piece

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What should I pack for a weekend in the mountains?",
)
DRAFTED = "green"  # as in chat
TITLES = ("one token at a time", "treespec; what it drafted is green")


@final
@dataclass
class Side:
    """A completion so far: (text, drafted) pieces, tokens and seconds."""

    pieces: list[tuple[str, bool]]
    tokens: int = 0
    seconds: float = 0.0


def compare(spec: Spec, tokens: int, console: Console) -> str:
    """Answer the questions in both ways and show it. Returns how much faster drafts were."""
    # 1. First-time measuring ends before any clock runs.
    specs = spec.baseline(), spec
    for each in specs:
        each.generate("Hello", max_new_tokens=8)

    # 2. Answer, and add up both sides' figures.
    totals, same = (Stats(), Stats()), 0
    for number, question in enumerate(QUESTIONS):
        prompt = [{"role": "user", "content": question}]
        streams = [each.stream(prompt, max_new_tokens=tokens) for each in specs]
        sides = [Side([]), Side([])]
        with shown(sides, console) as show:
            race(streams, sides, show)
        plain, drafting = (stream.output for stream in streams)
        totals[0].add(plain.stats)
        totals[1].add(drafting.stats)
        same += plain.token_ids == drafting.token_ids
        console.print(Text(f"> {question}", style="bold"))
        console.print(first_line(sides[1], console.width - 4), no_wrap=True)
        with_drafts = figures_of(drafting.stats, explain=not number)
        console.print(f"  {with_drafts}, without drafts {plain.stats.tokens_per_second:.1f}")
        if plain.token_ids != drafting.token_ids:
            parting = parted(spec, spec.encode(prompt), plain.token_ids, drafting.token_ids)
            console.print(f"  {parting}")

    # 3. The verdict.
    without, drafts = (total.tokens_per_second for total in totals)
    return (
        f"     {drafts:.1f} tokens/s with treespec, {without:.1f} without: {drafts / without:.2f} "
        f"times as fast; {same} of {len(QUESTIONS)} texts are the same"
    )


def parted(spec: Spec, prompt: list[int], plain: list[int], drafting: list[int]) -> str:
    """Where two greedy completions part, and what the target gives the two tokens there."""
    at = common_prefix(plain, drafting)
    ids = torch.tensor([prompt + plain[:at]])
    logits = spec.target.output_logits(spec.target.features(ids)[0, -1])  # [V]
    p = logits.float().softmax(-1)
    return (
        f"the two part at token {at + 1}, where the target gives their tokens "
        f"{p[plain[at]]:.1%} and {p[drafting[at]]:.1%}"
    )


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
    """Two columns that grow and vanish at the end. Yields what draws them; a pipe gets nothing."""
    if not console.is_terminal:
        yield lambda: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda: live.update(table_of(sides), refresh=True)


def table_of(sides: Sequence[Side]) -> Table:
    """The completions in two columns, each with its speed."""
    table = Table.grid(expand=True, padding=(0, 2))
    for _ in sides:
        table.add_column(ratio=1)
    table.add_row(*(Text(title, style="dim") for title in TITLES))
    table.add_row(*(coloured(side) for side in sides))
    speeds = [side.tokens / side.seconds if side.seconds else 0.0 for side in sides]
    table.add_row(*(Text(f"{speed:.1f} tokens/s", style="dim") for speed in speeds))
    return table


def coloured(side: Side) -> Text:
    """The completion so far, with what was drafted in colour."""
    return Text.assemble(*((words, DRAFTED if drafted else "") for words, drafted in side.pieces))


def first_line(side: Side, width: int) -> Text:
    """The beginning of a completion in one line, with what was drafted in colour."""
    text = Text("  ")
    for words, drafted in side.pieces:
        text.append(re.sub(r"\s+", " ", words), style=DRAFTED if drafted else "")
    text.truncate(width, overflow="ellipsis")
    return text


def measured(spec: Spec, verifiers: Sequence[tuple[str, str | None]], tokens: int) -> Table:
    """τ and tokens per second of verifiers at temperature 1, over the questions.

    verifiers: (name, tree) each; None is the verifier's own tree.
    """
    # 1. Every way answers a question before the next one.
    ways = {"one token at a time": spec.baseline()}
    for verifier, tree in verifiers:
        ways[f"{verifier}@{tree}" if tree else verifier] = spec.configured(tree, verifier)
    totals = {name: Stats() for name in ways}
    for number, question in enumerate(QUESTIONS):
        prompt = [{"role": "user", "content": question}]
        for name, way in ways.items():
            answer = way.generate(prompt, temperature=1.0, max_new_tokens=tokens, seed=number)
            totals[name].add(answer.stats)

    # 2. The table.
    table = Table.grid(padding=(0, 3))
    table.add_row("     verifier", f"τ ({TAU})", "tokens/s")
    for name, stats in totals.items():
        figures = f"{stats.acceptance_length:.2f}", f"{stats.tokens_per_second:.1f}"
        table.add_row(f"     {name}", *figures)
    return table
