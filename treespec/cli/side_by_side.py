"""`treespec quickstart`: decodings of the same questions, side by side and live, and in a table.

Two decodings take turns, a piece each: the side whose own clock is behind goes on. So each shows at
any moment what it would show at that time if it ran alone.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treespec.api.spec import Spec
from treespec.decoding.sequence import Piece
from treespec.decoding.stats import TAU, Stats, figures_of
from treespec.text.strings import printable

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What should I pack for a weekend in the mountains?",
)
PROMPTS = [[{"role": "user", "content": question}] for question in QUESTIONS]
PLAIN = "one token at a time"
DRAFTED = "green"  # as in chat


@final
@dataclass(eq=False)
class Side:
    """A completion so far, its drafted parts in colour, with its tokens and seconds."""

    title: str
    pieces: Iterator[Piece]
    shown: Text = field(default_factory=Text)
    tokens: int = 0
    seconds: float = 0.0


def compare(spec: Spec, tokens: int, console: Console) -> str:
    """Answer the questions in both ways and show it. Returns how much faster drafts were."""
    # 1. First-time measuring ends before any clock runs.
    ways = {PLAIN: spec.baseline(), f"treespec; what it drafted is {DRAFTED}": spec}
    for way in ways.values():
        way.generate("Hello", max_new_tokens=8)

    # 2. Race, and add up both sides' figures.
    totals, same = (Stats(), Stats()), 0
    for question, prompt in zip(QUESTIONS, PROMPTS, strict=True):
        streams = [way.stream(prompt, max_new_tokens=tokens) for way in ways.values()]
        sides = [Side(title, stream) for title, stream in zip(ways, streams, strict=True)]
        with Live(console=console, auto_refresh=False, transient=True) as live:  # no pipe shows it
            for _ in race(sides):
                live.update(table_of(sides), refresh=True)
        plain, drafting = outputs = [stream.output for stream in streams]
        for total, output in zip(totals, outputs, strict=True):
            total.add(output.stats)
        same += plain.token_ids == drafting.token_ids

        # 3. The question, the beginning of the answer in a line, its figures.
        line = Text(" ").join([Text(" "), *sides[1].shown.split()])
        line.truncate(console.width - 4, overflow="ellipsis")
        console.print(Text(f"> {question}", style="bold"), line, sep="\n", no_wrap=True)
        figures = figures_of(drafting.stats, explain=question == QUESTIONS[0])
        console.print(f"  {figures}, without drafts {plain.stats.tokens_per_second:.1f}")

    # 4. The verdict.
    without, drafts = (total.tokens_per_second for total in totals)
    rounding = (
        "" if same == len(QUESTIONS) else "; treespec certify tells whether rounding parts them"
    )
    return (
        f"     {drafts:.1f} tokens/s with treespec, {without:.1f} without: {drafts / without:.2f} "
        f"times as fast; {same} of {len(QUESTIONS)} texts are the same{rounding}"
    )


def race(sides: Sequence[Side], clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    """Run all sides to their ends, a piece each time: always that of the side that is behind."""
    running = list(sides)
    while running:
        side = min(running, key=lambda side: side.seconds)
        started = clock()
        piece = next(side.pieces, None)
        side.seconds += clock() - started
        if piece is None:
            running.remove(side)
            continue
        side.shown.append(printable(piece.text), DRAFTED if piece.drafted else "")
        side.tokens += len(piece.token_ids)
        yield


def table_of(sides: Sequence[Side]) -> Table:
    """The completions in two columns, each with its speed."""
    table = Table.grid(expand=True, padding=(0, 2))
    for _ in sides:
        table.add_column(ratio=1)
    speeds = [side.tokens / side.seconds if side.seconds else 0.0 for side in sides]
    table.add_row(*(Text(side.title, style="dim") for side in sides))
    table.add_row(*(side.shown for side in sides))
    table.add_row(*(Text(f"{speed:.1f} tokens/s", style="dim") for speed in speeds))
    return table


def measured(spec: Spec, verifiers: Sequence[str], tokens: int) -> Table:
    """τ and tokens per second of verifiers at temperature 1, over the questions.

    verifiers: names, with a tree of their own as in traversal@sampled.
    """
    # 1. Every way answers a question before the next one.
    ways = {PLAIN: spec.baseline()}
    for name in verifiers:
        verifier, _, tree = name.partition("@")
        ways[name] = spec.configured(tree or None, verifier)
    totals: dict[str, Stats] = defaultdict(Stats)
    for number, prompt in enumerate(PROMPTS):
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
