"""`treespec quickstart`: answer the same questions in two ways, shown live side by side, and compare verifiers.

Two decoders take turns, one piece at a time: the decoder that has used less time continues. So each side shows at any
moment the text that it would show at that time if it ran without the other.
"""

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treespec.api.spec import Spec
from treespec.engine.output import Stream
from treespec.engine.request import Piece
from treespec.engine.stats import Stats, format_stats
from treespec.files.printable import to_printable

QUICKSTART_QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What should I pack for a weekend in the mountains?",
)
QUICKSTART_PROMPTS = [[{"role": "user", "content": question}] for question in QUICKSTART_QUESTIONS]
PLAIN_TITLE = "one token at a time"
DRAFTED_STYLE = "green"  # as in chat
TABLE_INDENT = " " * 5


@dataclass(frozen=True)
class RaceResult:
    """The figures of all questions, answered with drafts and without them.

    Attributes:
        drafting_speed: tokens per second with drafts.
        plain_speed: tokens per second of one token at a time.
        equal_answers: number of questions with the same answer.
    """

    drafting_speed: float
    plain_speed: float
    equal_answers: int

    @property
    def speedup(self) -> float:
        return self.drafting_speed / self.plain_speed

    def __str__(self) -> str:
        verdict = (
            f"     {self.drafting_speed:.1f} tokens/s with treespec, {self.plain_speed:.1f} without: "
            f"{self.speedup:.2f} times as fast; "
            f"{self.equal_answers} of {len(QUICKSTART_QUESTIONS)} texts are the same"
        )
        if self.equal_answers < len(QUICKSTART_QUESTIONS):
            verdict += "; treespec certify tells whether rounding parts them"
        return verdict


def show_side_by_side(spec: Spec, tokens: int, console: Console) -> RaceResult:
    """Answer the questions without and with drafts, and show both. Returns the figures of all questions."""
    # 1. Warm up, so that measuring costs is not timed.
    specs = {PLAIN_TITLE: spec.baseline(), f"treespec; what it drafted is {DRAFTED_STYLE}": spec}
    for decoder in specs.values():
        decoder.warm_up()

    # 2. Answer side by side, and add up the figures.
    totals = (Stats(), Stats())
    equal_answers = 0
    for question, prompt in zip(QUICKSTART_QUESTIONS, QUICKSTART_PROMPTS, strict=True):
        streams = [decoder.stream(prompt, max_new_tokens=tokens) for decoder in specs.values()]
        texts = show_race(list(specs), streams, console)
        plain, drafting = (stream.output for stream in streams)
        for total, stream in zip(totals, streams, strict=True):
            total.add(stream.stats)
        if plain.token_ids == drafting.token_ids:
            equal_answers += 1

        # 3. Print the question, the beginning of the answer in one line, and its figures.
        words = Text("  ") + Text(" ").join(texts[1].split())
        words.truncate(console.width - 4, overflow="ellipsis")
        console.print(Text(f"> {question}", style="bold"), words, sep="\n", no_wrap=True)
        figures = format_stats(drafting.stats, explain=question == QUICKSTART_QUESTIONS[0])
        console.print(f"  {figures}, without drafts {plain.stats.tokens_per_second:.1f}")

    plain_total, drafting_total = totals
    return RaceResult(
        drafting_total.tokens_per_second, plain_total.tokens_per_second, equal_answers
    )


def show_race(titles: Sequence[str], streams: Sequence[Stream], console: Console) -> list[Text]:
    """Show answers side by side as they arrive, and return their texts."""
    texts = [Text() for _ in streams]
    with Live(console=console, auto_refresh=False, transient=True) as live:  # a pipe shows nothing
        for side, piece in interleave_streams(streams):
            style = ""
            if piece.drafted:
                style = DRAFTED_STYLE
            texts[side].append(to_printable(piece.text), style)
            speeds = [f"{stream.stats.tokens_per_second:.1f} tokens/s" for stream in streams]
            live.update(build_columns(titles, texts, speeds), refresh=True)
    return texts


def interleave_streams(streams: Sequence[Stream]) -> Iterator[tuple[int, Piece]]:
    """Yield (index of a stream, its next piece), always from the stream that has used the least time."""
    running = list(range(len(streams)))
    while running:
        side = min(running, key=lambda side: streams[side].stats.seconds["total"])
        piece = next(streams[side], None)
        if piece:
            yield side, piece
        else:
            running.remove(side)


def build_columns(titles: Sequence[str], *rows: Sequence[str | Text]) -> Table:
    """Build a table with a column for each title."""
    table = Table.grid(expand=True, padding=(0, 2))
    for title in titles:
        table.add_column(title, ratio=1)
    for row in (titles, *rows):
        table.add_row(*row)
    return table


def measure_verifiers(spec: Spec, verifiers: Sequence[str], tokens: int) -> dict[str, Stats]:
    """Measure verifiers at temperature 1, over the questions: summed figures by name, one token at a time first.

    Args:
        spec: target and drafter.
        verifiers: names, optionally with a tree, as in traversal@eagle.
        tokens: maximum number of tokens of an answer.
    """
    # 1. Answer each question with all verifiers before the next question.
    specs = {PLAIN_TITLE: spec.baseline()}
    for name in verifiers:
        verifier, _, tree = name.partition("@")
        specs[name] = spec.configured(tree or None, verifier)
    totals: dict[str, Stats] = defaultdict(Stats)
    for number, prompt in enumerate(QUICKSTART_PROMPTS):
        for name, decoder in specs.items():
            answer = decoder.generate(prompt, temperature=1.0, max_new_tokens=tokens, seed=number)
            totals[name].add(answer.stats)
    return totals


def build_verifier_table(totals: Mapping[str, Stats]) -> Table:
    """Build the table of the figures of `measure_verifiers`."""
    table = Table.grid(padding=(0, 3))
    table.add_row("     verifier", "τ (tokens a cycle)", "a cycle costs", "tokens/s")
    for name, stats in totals.items():
        tau = f"{stats.acceptance_length:.2f}"
        cost = f"{measure_cycle_cost(stats, totals[PLAIN_TITLE]):.2f} tokens"
        table.add_row(f"     {name}", tau, cost, f"{stats.tokens_per_second:.1f}")
    return table


def measure_cycle_cost(stats: Stats, plain: Stats) -> float:
    """Measure the time of a cycle in times of one token. plain: the figures of one token at a time."""
    return measure_cycle_seconds(stats) / measure_cycle_seconds(plain)


def measure_cycle_seconds(stats: Stats) -> float:
    """Measure the mean seconds of a cycle, without the prompts' prefill."""
    return (stats.seconds["total"] - stats.seconds["prefill"]) / max(stats.cycles, 1)


def explain_wide_trees(totals: Mapping[str, Stats]) -> str:
    """Explain why the widest tree is slower than the fastest one, and its worth on a larger model.

    Returns "" if the fastest verifier has the same τ or a larger one.
    """

    def count_nodes(name: str) -> float:
        return sum(totals[name].drafted) / max(totals[name].cycles, 1)

    def compare_widths(name: str) -> tuple[int, float]:
        return round(count_nodes(name)), totals[name].acceptance_length

    widest = max(totals, key=compare_widths)
    stats = totals[widest]
    fastest = max(totals.values(), key=lambda other: other.tokens_per_second)
    if stats.acceptance_length <= fastest.acceptance_length:
        return ""
    cost = measure_cycle_cost(stats, totals[PLAIN_TITLE])
    words = (
        f"{widest} drafts {count_nodes(widest):.0f} tokens a cycle, which costs this model {cost:.2f} tokens' time; "
        f"a larger model, which waits for its weights, could be {stats.acceptance_length:.2f} times as fast."
    )
    return textwrap.fill(words, 78, initial_indent=TABLE_INDENT, subsequent_indent=TABLE_INDENT)
