"""The benchmark for people: rich's tables on a terminal, the same in Markdown in a file."""

from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from treespec.eval.bench_config import NODES
from treespec.eval.bench_figures import Figure
from treespec.eval.bench_forwards import FRONTIERS, WAITING
from treespec.eval.bench_rows import label
from treespec.eval.table import STAGES, as_markdown, drafted_by

Measured = dict[str, Any]  # of one number of padded layers


def markdown(result: dict[str, Any]) -> str:
    """OUT/bench.md."""
    return as_markdown(lambda console: show(result, console, box.MARKDOWN))


def show(result: dict[str, Any], console: Console, style: box.Box = box.SIMPLE_HEAD) -> None:
    """Print headings, tables and notes. On a terminal what is in brackets stands below its value."""
    gap, padding = (" ", (0, 1)) if style is box.MARKDOWN else ("\n", (0, 1, 0, 0))

    def table(title: str, columns: Iterable[str], lines: Iterable[list[str]], labels: int) -> None:
        grid = Table(box=style, padding=padding)
        for number, column in enumerate(columns):
            grid.add_column(column.replace(" ", gap), justify="right" if number >= labels else "left")
        for line in lines:
            grid.add_row(*line[:labels], *(cell.replace(" (", f"{gap}(") for cell in line[labels:]))
        console.print(f"\n## {title}", style="bold")
        console.print(grid)

    paddings = result["paddings"]
    for title, what in (("The target's forward in ms, by nodes", "target"), ("The head's step in ms", "extend")):
        if not any(timed["what"] == what for measured in paddings for timed in measured["forwards"]):
            continue  # nothing drafts with a head
        names, lines = forwards(paddings, what)
        table(title, ["", "context", *names], lines, labels=2)
    cycles = ["cycle", *STAGES.values(), "overhead"]
    table("A cycle in ms", ["", "T", *cycles], rows(paddings, "cycle", cycle), labels=2)
    limits = ["τ", "tokens/s", "speedup", "bound", "speedup/bound", "overall: speedup", "bound", "speedup/bound"]
    table("Speedup and its bound", ["", "T", *limits], rows(paddings, "cycle", limit), labels=2)
    ratios = ["by model.generate", "by one token"]
    beside = ["tokens", "tokens/s", *ratios, "overall: tokens/s", *ratios, "= one token"]
    table("Beside transformers, prefill included", ["", "T", *beside], rows(paddings, "speed", speed), labels=2)
    if together := [row for measured in paddings for row in measured["batches"]]:
        over = ["tokens/s", "by one token", "by the smallest batch"]
        table("Batches", ["", "T", "texts", "tokens", *over], map(batch, together), labels=2)
    console.print()
    for note in notes(result):
        console.print(f"- {note}", markup=False, highlight=False)


def forwards(paddings: list[Measured], what: str) -> tuple[list[str], list[list[str]]]:
    """(columns, lines) of the forwards: a line a context."""
    names = {("target", n): str(n) for n in NODES}
    if what != "target":
        names = {("begin", WAITING): f"begin, {WAITING} tokens"} | {("extend", n): f"level of {n}" for n in FRONTIERS}
    lines = []
    for measured in paddings:
        ms = {(f["context"], f["what"], f["nodes"]): f["ms"] for f in measured["forwards"]}
        for context in dict.fromkeys(at[0] for at in ms):
            cells = [figure(ms[context, *at]) for at in names]
            name = label("target" if what == "target" else "head", measured["added"])
            lines.append([name, str(context), *cells])
    return list(names.values()), lines


def rows(paddings: list[Measured], part: str, cells: Callable[[Measured], list[str]]) -> list[list[str]]:
    """A line a row that has such a part, or has failed to have it."""
    return [
        [row["label"], f"{row['temperature']:g}", *cells(row)]
        for measured in paddings
        for row in measured["rows"]
        if row[part] or (part == "speed" and row["failed"])
    ]


def cycle(row: Measured) -> list[str]:
    found = row["cycle"]
    return [*(figure(found[name]) for name in ("cycle", *STAGES)), f"{found['overhead']['value']:.0%}"]


def limit(row: Measured) -> list[str]:
    found = row["cycle"]
    both = [figure(part[n]) for part in (found, found["overall"]) for n in ("speedup", "bound", "speedup_by_bound")]
    return [figure(found["acceptance_length"]), figure(found["tokens_per_second"], 1), *both]


def speed(row: Measured) -> list[str]:
    if row["failed"]:
        return [f"failed: {row['failed']}", *[""] * 7]
    found, same, answers = row["speed"], row["same_as_one_token"], row["answers"]
    cells = [str(sum(answer["tokens"] for answer in answers))]
    for part in (found, found["overall"]):
        cells += [figure(part["tokens_per_second"], 1), figure(part["over_generate"]), figure(part["over_one_token"])]
    return [*cells, "" if same is None else f"{same} of {len(answers)}"]


def batch(row: Measured) -> list[str]:
    over = (figure(row[name]) for name in ("over_one_token", "over_smallest"))
    numbers = str(row["batch"]), str(row["tokens"]), figure(row["tokens_per_second"], 1)
    return [row["label"], f"{row['temperature']:g}", *numbers, *over]


def figure(found: Figure | None, digits: int = 2) -> str:
    if found is None or found["value"] is None:
        return ""
    value, low, high = (None if x is None else f"{x:.{digits}f}" for x in found.values())
    return f"{value} ({low}–{high})" if low else f"{value}"


def notes(result: dict[str, Any]) -> list[str]:
    """What one must know to read the figures."""
    config = result["config"]
    of_peers = "the very model in memory, with the order of weights and the attention that treespec gives it"
    if config["stock_peers"]:
        of_peers = "a model of their own, as transformers loads it"
    lines = [
        f"Target {config['target']}, {drafted_by(config)}, assistant {config['assistant'] or 'none'}, questions "
        f"{config['questions']} ({result['questions']}), at most {config['max_new_tokens']} new tokens a turn, "
        f"seed {config['seed']}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers {transformers}, "
        "treespec {treespec}; all rows took turns.".format(**result["environment"]),
        f"Medians, of forwards over {config['rounds']} rounds, else over questions, with 95 % bootstrap intervals in "
        "brackets; overall, and τ: totals over totals of all questions. Sampled answers may end after a few tokens, "
        "which a median over questions counts like long ones.",
        "Bound: τ · T(1) / (T(N) + T_draft): the target's forward in one-token decoding, over that on the tree and all "
        "the head's forwards of a cycle. Speedup: tokens/s over one-token decoding's, without prefill. "
        "Overhead: share of a cycle outside these forwards.",
        "By model.generate, by one token: tokens/s over theirs on the same question, from prompt to last token. "
        "= one token: greedy answers with the very tokens of one-token decoding; in a lower precision than float32 "
        f"rounding alone may change them. Peers run on {of_peers}; assisted generation has transformers' defaults.",
    ]
    if config["batches"]:
        lines.append(
            "Batches: so many texts in every forward, the place of one that has ended taken by the next; tokens of all "
            "texts by the clock, prefill included; by one token: over one-token decoding of as many texts."
        )
    for measured in result["paddings"]:
        if measured["added"]:
            same = "to the bit" if not measured["logit_difference"] else f"within {measured['logit_difference']:.2g}"
            lines.append(
                f"Padded, +{measured['added']} layers: {measured['layers']} layers, of which the last "
                f"{measured['added']} compute and write zeros; the logits are the same {same}."
            )
    if left_out := result["left_out"]:
        lines.append(f"Questions left out, {len(left_out)}: {'; '.join(left_out[:3])}.")
    return lines
