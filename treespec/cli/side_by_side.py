"""`treespec quickstart`: decodings of the same questions, side by side and live, and in a table.

Two decodings take turns, a piece each: the side whose own clock is behind goes on. So each shows at
any moment the text that it would show at that time without the other.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treespec.api.spec import Spec
from treespec.engine.output import Stream
from treespec.engine.request import Piece
from treespec.engine.stats import TAU_MEANING, Stats, format_stats
from treespec.files.printable import to_printable

QUICKSTART_QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "What should I pack for a weekend in the mountains?",
)
QUICKSTART_PROMPTS = [[{"role": "user", "content": question}] for question in QUICKSTART_QUESTIONS]
PLAIN_TITLE = "one token at a time"
DRAFTED_STYLE = "green"  # as in chat


def show_side_by_side(spec: Spec, tokens: int, console: Console) -> str:
    """Answer the questions in both ways and show it. Returns how much faster drafts were."""
    # 1. First-time measuring ends before any clock runs.
    ways = {PLAIN_TITLE: spec.baseline(), f"treespec; what it drafted is {DRAFTED_STYLE}": spec}
    for way in ways.values():
        way.warm_up()

    # 2. Race, and add up both sides' figures.
    totals = (Stats(), Stats())
    same = 0
    for question, prompt in zip(QUICKSTART_QUESTIONS, QUICKSTART_PROMPTS, strict=True):
        streams = [way.stream(prompt, max_new_tokens=tokens) for way in ways.values()]
        texts = show_race(list(ways), streams, console)
        plain, drafting = (stream.output for stream in streams)
        for total, stream in zip(totals, streams, strict=True):
            total.add(stream.stats)
        if plain.token_ids == drafting.token_ids:
            same += 1

        # 3. The question, the beginning of the answer in a line, its figures.
        words = Text("  ") + Text(" ").join(texts[1].split())
        words.truncate(console.width - 4, overflow="ellipsis")
        console.print(Text(f"> {question}", style="bold"), words, sep="\n", no_wrap=True)
        figures = format_stats(drafting.stats, explain=question == QUICKSTART_QUESTIONS[0])
        console.print(f"  {figures}, without drafts {plain.stats.tokens_per_second:.1f}")

    # 4. The verdict.
    without, drafts = (total.tokens_per_second for total in totals)
    verdict = (
        f"     {drafts:.1f} tokens/s with treespec, {without:.1f} without: {drafts / without:.2f} "
        f"times as fast; {same} of {len(QUICKSTART_QUESTIONS)} texts are the same"
    )
    if same < len(QUICKSTART_QUESTIONS):
        verdict += "; treespec certify tells whether rounding parts them"
    return verdict


def show_race(titles: Sequence[str], streams: Sequence[Stream], console: Console) -> list[Text]:
    """Show answers as they come, side by side, and return their texts."""
    texts = [Text() for _ in streams]
    with Live(console=console, auto_refresh=False, transient=True) as live:  # no pipe shows it
        for side, piece in interleave_streams(streams):
            style = ""
            if piece.drafted:
                style = DRAFTED_STYLE
            texts[side].append(to_printable(piece.text), style)
            speeds = [f"{stream.stats.tokens_per_second:.1f} tokens/s" for stream in streams]
            live.update(build_columns(titles, texts, speeds), refresh=True)
    return texts


def interleave_streams(streams: Sequence[Stream]) -> Iterator[tuple[int, Piece]]:
    """(number of the stream, its next piece), always of the stream whose clock is behind."""
    running = list(range(len(streams)))
    while running:
        side = min(running, key=lambda side: streams[side].stats.seconds["total"])
        piece = next(streams[side], None)
        if piece:
            yield side, piece
        else:
            running.remove(side)


def build_columns(titles: Sequence[str], *rows: Sequence[str | Text]) -> Table:
    """The completions in columns, each with its speed."""
    table = Table.grid(expand=True, padding=(0, 2))
    for title in titles:
        table.add_column(title, ratio=1)
    for row in (titles, *rows):
        table.add_row(*row)
    return table


def measure_verifiers(spec: Spec, verifiers: Sequence[str], tokens: int) -> Table:
    """τ and tokens per second of verifiers at temperature 1, over the questions.

    verifiers: names, with a tree of their own as in traversal@eagle.
    """
    # 1. Every way answers a question before the next one.
    ways = {PLAIN_TITLE: spec.baseline()}
    for name in verifiers:
        verifier, _, tree = name.partition("@")
        ways[name] = spec.configured(tree or None, verifier)
    totals: dict[str, Stats] = defaultdict(Stats)
    for number, prompt in enumerate(QUICKSTART_PROMPTS):
        for name, way in ways.items():
            answer = way.generate(prompt, temperature=1.0, max_new_tokens=tokens, seed=number)
            totals[name].add(answer.stats)

    # 2. The table.
    table = Table.grid(padding=(0, 3))
    table.add_row("     verifier", f"τ ({TAU_MEANING})", "tokens/s")
    for name, stats in totals.items():
        tau = f"{stats.acceptance_length:.2f}"
        table.add_row(f"     {name}", tau, f"{stats.tokens_per_second:.1f}")
    return table
