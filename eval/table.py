"""The summary for people: rich's tables on a terminal, the same in Markdown in a file."""

import io
import re
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from treespec.eval.summary import FEW

STAGES = {
    "head": "draft model",
    "rest_of_drafting": "rest of drafting",
    "target": "target",
    "verify": "verify",
    "commit": "commit",
    "rest": "rest",
}


def markdown(summary: dict[str, Any]) -> str:
    """OUT/summary.md."""
    return as_markdown(lambda console: show(summary, console, box.MARKDOWN))


def as_markdown(show: Callable[[Console], None]) -> str:
    """What `show` prints, with tables in the style of box.MARKDOWN."""
    file = io.StringIO()
    show(Console(file=file, width=10_000, color_system=None))
    lines = "\n".join(line.strip() for line in file.getvalue().splitlines())
    return re.sub("\n{3,}", "\n\n", lines).strip() + "\n"


def show(summary: dict[str, Any], console: Console, style: box.Box = box.SIMPLE_HEAD) -> None:
    """Print headings, tables and notes. On a terminal what is in brackets stands below its value."""
    rows = summary["configurations"]
    names = ["verifier", "tree"] if any(row["tree"] for row in rows) else ["verifier"]
    if len({row.get("drafter") for row in rows} - {None}) > 1:
        names = ["drafter", *names]
    gap, padding = (" ", (0, 1)) if style is box.MARKDOWN else ("\n", (0, 1, 0, 0))

    def table(title: str, columns: Iterable[str], cells: Callable[[dict[str, Any]], list[str]]) -> None:
        grid = Table(*map(str.capitalize, names), "T", box=style, padding=padding)
        for column in columns:
            grid.add_column(column.replace(" ", gap), justify="right", overflow="fold")
        for row in rows:
            figures = (cell.replace(" (", f"{gap}(") for cell in cells(row))
            label = row | {"verifier": row["verifier"] + ("" if row["lossless"] else " (lossy)")}
            label["drafter"] = short(row.get("drafter"))
            grid.add_row(*(label[name] or "" for name in names), f"{row['temperature']:g}", *figures)
        console.print(f"\n## {title}", style="bold")
        console.print(grid)

    categories = list(rows[0]["categories"])
    depths = range(max(len(row["overall"]["acceptance_rate_by_depth"]) for row in rows))
    table(
        "Acceptance length and speed",
        ["τ", "tokens/s", "speedup", "by question", "= baseline"],
        _main,
    )
    table("By category: τ (speedup)", [*categories, "overall"], lambda row: _by_category(row, categories))
    if depths:
        columns = ["nodes", *(str(d + 1) for d in depths)]
        table("Acceptance rate α by depth", columns, lambda row: _rates(row, depths))
    table("A cycle's time in ms", ["cycle", *STAGES.values(), "overhead", "prefill"], _cycle)
    console.print()
    for note in notes(summary):
        console.print(f"- {note}", markup=False, highlight=False)


def short(drafter: str | None) -> str:
    """The kind of a drafter, and the last part of its path."""
    kind, colon, value = (drafter or "").partition(":")
    return kind + colon + PurePath(value).name


def notes(summary: dict[str, Any]) -> list[str]:
    """What one must know to read the figures."""
    config, rows = summary["config"], summary["configurations"]
    lines = [
        f"Target {config['target']}, {drafted_by(config)}, questions {config['questions']} "
        f"({summary['questions']}), at most {config['max_new_tokens']} new tokens a turn, "
        f"tree {config['tree'] or 'of each verifier by default'}, seed {config['seed']}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers {transformers}, "
        "treespec {treespec}.".format(**summary["environment"]),
        "τ: tokens by target forward. Speedup: tokens/s over the baseline's, totals over totals; by question: "
        "the mean of the questions' speedups. Ranges in brackets: 95 % bootstrap intervals over questions. "
        "= baseline: answers (turns) with the baseline's very tokens. Nodes: of the tree in one forward.",
        "Overhead: share of a cycle outside the forwards of target and draft model. Prefill: all prompts "
        "through the target and the draft model.",
    ]
    if (batch := config.get("batch", 1)) > 1:
        lines.append(
            f"Rows are batched: {batch} questions were answered together, by the baseline too, their turns in step. "
            "Tokens/s are the tokens of all by the clock. A cycle's time is divided evenly among its texts, a cycle "
            "above is one text's share. Intervals take the questions for independent."
        )
    if few := summary["few_questions"]:
        lines.append(f"Fewer than {FEW} questions, so a rough guide with intervals too narrow: {', '.join(few)}.")
    turns = sum(sum(row["ended"].values()) for row in rows)
    for end, name in (("max_new_tokens", "max_new_tokens"), ("context", "the target's context")):
        if cut := sum(row["ended"][end] for row in rows):
            lines.append(f"{cut} of {turns} answers were ended by {name}.")
    if left_out := summary["left_out"]:
        lines.append(f"Left out, {len(left_out)}: {'; '.join(left_out[:3])}.")
    return lines


def drafted_by(config: dict[str, Any]) -> str:
    drafter = config.get("drafter")
    return f"drafter {drafter}" if drafter else f"head {config['head']}"


def _main(row: dict[str, Any]) -> list[str]:
    overall, same = row["overall"], row["same_as_baseline"]
    return [
        _interval(overall["acceptance_length"]),
        _interval(overall["tokens_per_second"], digits=1),
        _interval(overall["speedup"]),
        _interval(overall["speedup_by_question"]),
        f"{same['same']} of {same['answers']}" if same else "",
    ]


def _by_category(row: dict[str, Any], categories: list[str]) -> list[str]:
    groups = [*(row["categories"][name] for name in categories), row["overall"]]
    return [
        f"{group['acceptance_length']['value']:.2f}"
        + (f" ({group['speedup']['value']:.2f})" if group["speedup"] else "")
        for group in groups
    ]


def _rates(row: dict[str, Any], depths: range) -> list[str]:
    rates = row["overall"]["acceptance_rate_by_depth"]
    by_depth = [_interval(rates[d]) if d < len(rates) else "" for d in depths]
    return [f"{row['overall']['nodes']:.0f}", *by_depth]


def _cycle(row: dict[str, Any]) -> list[str]:
    overall = row["overall"]
    ms, share = overall["cycle_ms"], overall["cycle_share"]
    stages = [f"{ms[stage]:.2f} ({share[stage]:.0%})" for stage in STAGES]
    prefill = f"{overall['prefill_seconds']:.2f} s"
    return [f"{sum(ms.values()):.2f}", *stages, f"{overall['overhead']:.0%}", prefill]


def _interval(figure: dict[str, float | None] | None, digits: int = 2) -> str:
    if figure is None or figure["value"] is None:
        return ""
    value, low, high = (None if x is None else f"{x:.{digits}f}" for x in figure.values())
    return f"{value} ({low}–{high})" if low else f"{value}"
