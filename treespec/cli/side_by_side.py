"""Two decodings of the same completions, side by side and live: one token at a time, and with drafts.

They take turns, a piece each: the side whose own clock is behind goes on. So each shows at any
moment what it would show at that time if it ran alone.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treespec.api.spec import Spec
from treespec.decoding.stats import TAU, Stats, figures_of
from treespec.text.strings import common_prefix, printable

if TYPE_CHECKING:
    from treespec.decoding.sequence import Piece

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What should I pack for a weekend in the mountains?",
)
PROMPTS = [[{"role": "user", "content": question}] for question in QUESTIONS]
DRAFTED = "green"  # as in chat
PLAIN = "one token at a time"


@final
@dataclass
class Side:
    """A completion so far: (text, drafted) pieces, tokens and seconds."""

    title: str = ""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def coloured(self, spaces: str = r"(?!)") -> Text:
        """The completion, with what was drafted in colour. spaces: what becomes a single one."""
        parts = [(re.sub(spaces, " ", words), drafted) for words, drafted in self.pieces]
        return Text.assemble(*((words, DRAFTED if drafted else "") for words, drafted in parts))


def compare(spec: Spec, tokens: int, console: Console) -> str:
    """Answer the questions in both ways and show it. Returns how much faster drafts were."""
    # 1. First-time measuring ends before any clock runs.
    specs = spec.baseline(), spec
    for each in specs:
        each.generate("Hello", max_new_tokens=8)

    # 2. Answer, and add up both sides' figures.
    totals, same = (Stats(), Stats()), 0
    for number, (question, prompt) in enumerate(zip(QUESTIONS, PROMPTS, strict=True)):
        streams = [each.stream(prompt, max_new_tokens=tokens) for each in specs]
        sides = Side(PLAIN), Side("treespec; what it drafted is green")
        with Live(console=console, auto_refresh=False, transient=True) as live:  # no pipe shows it

            def show(live: Live = live, sides: Sequence[Side] = sides) -> None:
                live.update(table_of(sides), refresh=True)

            race(streams, sides, show)
        plain, drafting = (stream.output for stream in streams)
        for total, output in zip(totals, (plain, drafting), strict=True):
            total.add(output.stats)
        same += plain.token_ids == drafting.token_ids

        # 3. The question, the beginning of the answer, its figures.
        line = Text("  ") + sides[1].coloured(r"\s+")
        line.truncate(console.width - 4, overflow="ellipsis")
        console.print(Text(f"> {question}", style="bold"))
        console.print(line, no_wrap=True)
        with_drafts = figures_of(drafting.stats, explain=not number)
        console.print(f"  {with_drafts}, without drafts {plain.stats.tokens_per_second:.1f}")
        if plain.token_ids != drafting.token_ids:
            ids = spec.encode(prompt)
            console.print(f"  {parted(spec, ids, plain.token_ids, drafting.token_ids)}")

    # 4. The verdict.
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
        stream, side = turn = min(running, key=lambda pair: pair[1].seconds)
        started = clock()
        piece = next(stream, None)
        side.seconds += clock() - started
        if piece is None:
            running.remove(turn)
            continue
        side.pieces.append((printable(piece.text), piece.drafted))
        side.tokens += len(piece.token_ids)
        show()


def table_of(sides: Sequence[Side]) -> Table:
    """The completions in two columns, each with its speed."""
    table = Table.grid(expand=True, padding=(0, 2))
    for _ in sides:
        table.add_column(ratio=1)
    speeds = [side.tokens / side.seconds if side.seconds else 0.0 for side in sides]
    table.add_row(*(Text(side.title, style="dim") for side in sides))
    table.add_row(*(side.coloured() for side in sides))
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
