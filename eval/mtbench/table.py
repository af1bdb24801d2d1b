"""An evaluation as people read it: tables, notes and a verdict."""

from collections.abc import Callable, Sequence
from typing import Any

from treespec.eval.common import STAGE_NAMES, STAGES, drafted_by
from treespec.eval.mtbench.summary import FEW
from treespec.eval.report import Report, Table
from treespec.eval.verdict import interval, short, tree_name, verdict


def report_of(summary: dict[str, Any]) -> Report:
    """What OUT/summary.md and the terminal show."""
    rows = summary["configurations"]
    categories = list(rows[0]["categories"])
    depths = range(max(len(row["overall"]["acceptance_rate_by_depth"]) for row in rows))
    speeds = ["τ", "tokens/s", "speedup", "by question", "identical"]
    cycle = ["cycle", *STAGE_NAMES.values(), "overhead", "prefill"]
    tables = [
        _table("Acceptance length τ (tokens per target forward) and speed", speeds, rows, _main),
        _table(
            "By category: τ (speedup)",
            [*categories, "overall"],
            rows,
            lambda row: _by_category(row, categories),
        ),
    ]
    if depths:
        by_depth = ["nodes", *(str(depth + 1) for depth in depths)]
        tables.append(
            _table(
                "Acceptance rate α by depth",
                by_depth,
                rows,
                lambda row: _rates(row, depths),
                brief=True,
            )
        )
    tables.append(_table("A cycle's time in ms (share)", cycle, rows, _cycle, brief=True))
    return Report(tables, notes(summary), verdict(summary["configurations"]))


def _table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[dict[str, Any]],
    cells: Callable[[dict[str, Any]], list[str]],
    brief: bool = False,
) -> Table:
    """A row a configuration, under the names that tell it from the others."""
    several = len({row.get("drafter") for row in rows} - {None}) > 1
    labels = [
        [
            short(row.get("drafter")) if several else "",
            row["verifier"] + ("" if row["lossless"] else " (lossy)"),
            tree_name(row["tree"]),
            f"{row['temperature']:g}",
        ]
        for row in rows
    ]
    whole = [[*label, *cells(row)] for label, row in zip(labels, rows, strict=True)]
    return Table(title, ["Drafter", "Verifier", "Tree", "T"], columns, whole, brief)


def notes(summary: dict[str, Any]) -> list[str]:
    """What one must know to read the figures."""
    config, rows = summary["config"], summary["configurations"]
    lines = [
        f"Target {config['target']}, {drafted_by(config)}, questions {config['questions']} "
        f"({summary['questions']}), at most {config['max_new_tokens']} new tokens a turn, "
        f"tree {config['tree'] or 'of each verifier by default'}, seed {config['seed']}.",
        "Measured on {device}, {dtype}, CPU threads: {threads}, torch {torch}, transformers {transformers}, "
        "treespec {treespec}.".format(**summary["environment"]),
        "Baseline: plain decoding, one token at a time through the same target. Speedup: tokens/s over the baseline's, "
        "totals over totals; by question: the mean of the questions' speedups. Ranges in brackets, which a narrow "
        "terminal leaves out in the last two tables: 95% bootstrap intervals over questions. "
        "Identical: answers (turns) with the baseline's very tokens. Nodes: of the tree in one forward.",
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
        lines.append(
            f"Fewer than {FEW} questions, so a rough guide with intervals too narrow: {', '.join(few)}."
        )
    turns = sum(sum(row["ended"].values()) for row in rows)
    for end, name in (("max_new_tokens", "max_new_tokens"), ("context", "the target's context")):
        if cut := sum(row["ended"][end] for row in rows):
            lines.append(f"{cut} of {turns} answers were ended by {name}.")
    if left_out := summary["left_out"]:
        lines.append(f"Left out, {len(left_out)}: {'; '.join(left_out[:3])}.")
    return lines


def _main(row: dict[str, Any]) -> list[str]:
    overall, same = row["overall"], row["same_as_baseline"]
    return [
        interval(overall["acceptance_length"]),
        interval(overall["tokens_per_second"], digits=1),
        interval(overall["speedup"]),
        interval(overall["speedup_by_question"]),
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
    by_depth = [interval(rates[d]) if d < len(rates) else "" for d in depths]
    return [f"{row['overall']['nodes']:.0f}", *by_depth]


def _cycle(row: dict[str, Any]) -> list[str]:
    overall = row["overall"]
    ms, share = overall["cycle_ms"], overall["cycle_share"]
    stages = [f"{ms[stage]:.2f} ({share[stage]:.0%})" for stage in STAGES]
    prefill = f"{overall['prefill_seconds']:.2f} s"
    return [f"{sum(ms.values()):.2f}", *stages, f"{overall['overhead']:.0%}", prefill]
