"""`treespec quickstart`: answer the same questions in two ways, shown live side by side, and compare verifiers.

Two decoders take turns, one piece at a time: the decoder that has used less time continues. So each side shows at any
moment the text that it would show at that time if it ran without the other.
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
    """Answer the questions without and with drafts, and show both. Returns a line with the speedup."""
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

    # 4. Format the verdict.
    plain_speed, drafting_speed = (total.tokens_per_second for total in totals)
    verdict = (
        f"     {drafting_speed:.1f} tokens/s with treespec, {plain_speed:.1f} without: "
        f"{drafting_speed / plain_speed:.2f} times as fast; "
        f"{equal_answers} of {len(QUICKSTART_QUESTIONS)} texts are the same"
    )
    if equal_answers < len(QUICKSTART_QUESTIONS):
        verdict += "; treespec certify tells whether rounding parts them"
    return verdict


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


def measure_verifiers(spec: Spec, verifiers: Sequence[str], tokens: int) -> Table:
    """Measure τ and tokens per second of verifiers at temperature 1, over the questions.

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

    # 2. Build the table.
    table = Table.grid(padding=(0, 3))
    table.add_row("     verifier", f"τ ({TAU_MEANING})", "tokens/s")
    for name, stats in totals.items():
        tau = f"{stats.acceptance_length:.2f}"
        table.add_row(f"     {name}", tau, f"{stats.tokens_per_second:.1f}")
    return table
