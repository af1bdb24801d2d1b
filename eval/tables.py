"""An evaluation as people read it: what OUT/report.md, OUT/report.html and the terminal show."""

from collections.abc import Callable, Sequence
from typing import Any

from treespec.eval.common import STAGE_NAMES, drafted_by
from treespec.eval.config import EvalConfig
from treespec.eval.contestants import batches_of
from treespec.eval.figures import FEW, Row, Summary
from treespec.eval.report import Cell, Report, Table, filled_in, percent, shown
from treespec.eval.verdict import batch_of, noise_of, several, short, tree_name, verdict

LABELS = ("Drafter", "Method", "Tree", "T", "Batch")

Cells = Callable[[Row], dict[str, Cell]]  # of a row, by column


def report_of(summary: Summary) -> Report:
    """Tables, notes and verdict."""
    # 1. Speed, of all questions and by category.
    rows, timed = summary["rows"], summary["timed"]
    own = [row for row in rows if not row["peer"]]
    pairs = [row for row in own if row["drafter"] and row["overall"]["bound"]]
    again = [
        [
            "",
            "baseline again",
            "",
            f"{a['temperature']:g}",
            batch_of(a, rows),
            {"speedup": a["speedup"]},
        ]
        for a in summary["again"]
    ]
    failed = [["", name, "", "", "", {"tokens/s": "failed"}] for name in summary["failed"]]
    title = "Acceptance length τ (tokens per target forward) and speed"

    # 2. Right answers, what a cycle accepts and where its time goes, the bound of the speedup.
    tables = [
        table(title, rows, speeds, [*again, *failed]),
        table("By category: τ (speedup)", own, by_category),
        table("Right answers", [row for row in rows if row["right"]], right),
        table("Acceptance rate α by depth", own, rates),
        table("A cycle's time in ms (share)", own if timed else [], cycle),
        table("Speedup without prompts, and its bound", pairs if timed else [], bound),
        cost_table(summary["costs"]),
    ]
    return Report(tables, notes(summary), verdict(summary))


def table(
    title: str, rows: Sequence[Row], cells: Cells, more: Sequence[Sequence[Any]] = ()
) -> Table:
    """A row for each contestant, labelled by what tells it from the others.

    more: further rows, their labels and then their cells by column.
    """
    lines: list[Any] = [[*labels_of(row, rows), cells(row)] for row in rows] + [*more]
    columns = list(dict.fromkeys(name for *_, own in lines for name in own))
    found = [[*labels, *map(own.get, columns)] for *labels, own in lines]
    return Table(title, LABELS, columns, found, reference=1.0)


def labels_of(row: Row, rows: Sequence[Row]) -> list[str]:
    method = row["method"] + ("" if row["lossless"] else " (lossy)")
    method += f", {row['peer']}" if row["peer"] else ""
    drafter = short(row["drafter"]) if several(rows) else ""
    heat = f"{row['temperature']:g}"
    return [drafter, method, tree_name(row["tree"]), heat, batch_of(row, rows)]


def speeds(row: Row) -> dict[str, Cell]:
    overall = row["overall"]
    alone = row["peer"] or row["batch"] == 1  # a batch shares its seconds out
    first = f"{overall['first_token']:.3f}" if alone and overall["first_token"] else ""
    return {
        "τ": overall["acceptance_length"],
        "tokens/s": shown(overall["tokens_per_second"]),
        "speedup": overall["speedup"],
        "by generate": row["by_generate"],
        "first token, s": first,
        "identical": "" if row["same"] is None else f"{row['same']} of {row['turns']}",
    }


def by_category(row: Row) -> dict[str, Cell]:
    """A cell for each category, then one for all questions."""
    cells: dict[str, Cell] = {}
    for name, figures in {**row["categories"], "overall": row["overall"]}.items():
        both = (shown(figures[which]).split() for which in ("acceptance_length", "speedup"))
        tau, speedup = ((values or [""])[0] for values in both)
        cells[name] = f"{tau} ({speedup})" if speedup else tau
    return cells


def right(row: Row) -> dict[str, Cell]:
    right, same = row["right"], row["right"]["same"]
    return {
        "right": f"{right['right']} of {right['answers']}",
        "%": shown(percent(right["share"])),
        "% less the baseline's": shown(percent(right["difference"])),
        "same verdict": "" if same is None else f"{same} of {right['answers']}",
    }


def rates(row: Row) -> dict[str, Cell]:
    by_depth = enumerate(row["overall"]["acceptance_rate_by_depth"], 1)
    return {"nodes": f"{row['overall']['nodes']:.0f}"} | {str(d): rate for d, rate in by_depth}


def cycle(row: Row) -> dict[str, Cell]:
    ms = row["overall"]["cycle_ms"]
    whole = sum(ms.values())
    return {
        "cycle": f"{whole:.2f}",
        **{name: f"{ms[s]:.2f} ({ms[s] / whole:.0%})" for s, name in STAGE_NAMES.items()},
        "overhead": f"{1 - (ms['target'] + ms['head']) / whole:.0%}",
        "prefill": f"{row['overall']['prefill_seconds']:.2f} s",
    }


def bound(row: Row) -> dict[str, Cell]:
    overall = row["overall"]
    speedup, most = overall["decoding_speedup"], overall["bound"]
    return {
        "τ": overall["acceptance_length"],
        "speedup": speedup,
        "bound": most,
        "speedup/bound": f"{speedup['value'] / most['value']:.0%}",
    }


def cost_of(cost: dict[str, Any]) -> dict[str, str]:
    """A cost model (`treespec.draft.cost.model.Cost`) in ms, as a row by column."""
    seconds = {str(n): s for n, s in zip(cost["nodes"], cost["forward"], strict=True)}
    seconds |= {"first draft level": cost["begin"] + cost["level"], "each further": cost["level"]}
    return {"Context": str(cost["context"])} | {n: f"{1000 * s:.2f}" for n, s in seconds.items()}


def cost_table(costs: Sequence[dict[str, Any]]) -> Table:
    """What a cycle costs, a row a context; without rows if there is no `--contexts`."""
    rows = [cost_of(cost) for cost in costs]
    label, *columns = dict.fromkeys(name for row in rows for name in row) or [""]
    cells = [[row.get(name, "") for name in (label, *columns)] for row in rows]
    return Table("A cycle's cost in ms, by nodes of its tree", [label], columns, cells)


def notes(summary: Summary) -> list[str]:
    """What one must know to read the figures."""
    rows, config = summary["rows"], EvalConfig(**summary["options"])
    ends = {"max_new_tokens": "max_new_tokens", "context": "the target's context"}
    text = filled_in(
        "notes.txt",
        summary=summary,
        config=config,
        drafted_by=drafted_by(summary["options"]),
        few=FEW,
        bounded=any(row["overall"]["bound"] for row in rows),
        peers=any(row["peer"] for row in rows),
        checked=any(row["right"] for row in rows),
        batches=[batch for batch in batches_of(config) if batches_of(config)[-1] > 1],
        noises=[(again, noise_of(again["speedup"])) for again in summary["again"]],
        ended={cause: sum(row["ended"][end] for row in rows) for end, cause in ends.items()},
        turns=sum(row["turns"] for row in rows),
    )
    return [" ".join(note.split()) for note in text.split("\n\n") if note.strip()]
