"""An evaluation as people read it: tables, notes and a verdict."""

from collections.abc import Callable, Iterable, Sequence

from treespec.eval.bootstrap import Figure
from treespec.eval.common import STAGE_NAMES
from treespec.eval.figures import Figures
from treespec.eval.forwards import FRONTIERS, NODES, WAITING
from treespec.eval.notes import (
    batch_of,
    compares,
    notes,
    percent,
    right_sentences,
    several,
    verdict,
)
from treespec.eval.report import Report, Table
from treespec.eval.summary import Row, Summary
from treespec.eval.verdict import interval, short, tree_name

LABELS = ("Drafter", "Method", "Tree", "T", "Batch")

Line = tuple[list[str], dict[str, str]]  # its labels, and its cells by column


def report_of(summary: Summary) -> Report:
    """What OUT/report.md and the terminal show."""
    # 1. Speed, of all questions and by category.
    rows, timed = summary["rows"], summary["timed"]
    own = [row for row in rows if not row["peer"]]
    pairs = [row for row in own if row["drafter"]]
    more: list[Line] = [
        (
            ["", "baseline again", "", f"{again['temperature']:g}", batch_of(again, rows)],
            {"speedup": interval(again["speedup"])},
        )
        for again in summary["again"]
    ]
    more += [(["", name, "", "", ""], {"tokens/s": "failed"}) for name in summary["failed"]]
    peers = len(own) < len(rows)
    title = "Acceptance length τ (tokens per target forward) and speed"
    tables = [
        table(title, rows, lambda row: _speeds(row, peers), more=more),
        table("By category: τ (speedup)", own, lambda row: _by_group(row, _length)),
    ]
    if timed and len(rows[0]["categories"]) > 1:
        tables.append(
            table("By category: tokens/s", rows, lambda row: _by_group(row, _speed), True)
        )

    # 2. Right answers, what a cycle accepts and where its time goes, the bound of the speedup.
    checked = [row for row in rows if row["right"]]
    tables += [
        table("Right answers", checked, _right),
        table("Acceptance rate α by depth", own, _rates, brief=True),
        table("A cycle's time in ms (share)", own if timed else [], _cycle, brief=True),
    ]
    bounded = pairs if timed and compares(summary) else []
    tables.append(table("Speedup without prompts, and its bound", bounded, _bound))
    return Report(
        tables + forward_tables(summary),
        notes(summary),
        [*verdict(summary), *right_sentences(rows)],
    )


def table(
    title: str,
    rows: Sequence[Row],
    cells: Callable[[Row], dict[str, str]],
    brief: bool = False,
    more: Iterable[Line] = (),
) -> Table:
    """A row for each contestant, labelled by what tells it from the others, and more rows."""
    lines: list[Line] = []
    for row in rows:
        drafter = short(row["drafter"]) if several(rows) else ""
        method = row["method"] + ("" if row["lossless"] else " (lossy)")
        method += f", {row['peer']}" if row["peer"] else ""
        label = [drafter, method, tree_name(row["tree"]), f"{row['temperature']:g}"]
        lines.append(([*label, batch_of(row, rows)], cells(row)))
    lines += more
    columns = list(dict.fromkeys(name for _, own in lines for name in own))
    cells_of = [[*label, *(own.get(name, "") for name in columns)] for label, own in lines]
    return Table(title, LABELS, columns, cells_of, brief)


def _speeds(row: Row, peers: bool) -> dict[str, str]:
    overall = row["overall"]
    alone = row["peer"] or row["batch"] == 1  # a batch shares its seconds out
    first = overall["first_token"] if peers and alone else None
    return {
        "τ": interval(overall["acceptance_length"]),
        "tokens/s": interval(overall["tokens_per_second"], digits=1),
        "speedup": interval(overall["speedup"]),
        "by question": interval(overall["by_question"]),
        "by generate": interval(row["by_generate"]),
        "by the smallest batch": interval(row["over_smallest"]),
        "first token, s": "" if first is None else f"{first:.3f}",
        "identical": "" if row["same"] is None else f"{row['same']} of {row['turns']}",
    }


def _by_group(row: Row, cell: Callable[[Figures], str]) -> dict[str, str]:
    """A cell for each category, then one for all questions."""
    groups = {**row["categories"], "overall": row["overall"]}
    return {name: cell(figures) for name, figures in groups.items()}


def _length(figures: Figures) -> str:
    tau, speedup = (_value(figures[name]) for name in ("acceptance_length", "speedup"))
    return f"{tau} ({speedup})" if speedup else tau


def _value(figure: Figure | None) -> str:
    """A figure without its interval."""
    return "" if figure is None or figure["value"] is None else f"{figure['value']:.2f}"


def _speed(figures: Figures) -> str:
    return interval(figures["tokens_per_second"], digits=1)


def _right(row: Row) -> dict[str, str]:
    right, same = row["right"], row["right"]["same"]
    return {
        "right": f"{right['right']} of {right['answers']}",
        "%": percent(right["share"]),
        "% less the baseline's": percent(right["difference"]),
        "same verdict": "" if same is None else f"{same} of {right['answers']}",
    }


def _rates(row: Row) -> dict[str, str]:
    rates = enumerate(row["overall"]["acceptance_rate_by_depth"], 1)
    nodes = {"nodes": f"{row['overall']['nodes']:.0f}"}
    return nodes | {str(depth): interval(rate) for depth, rate in rates}


def _cycle(row: Row) -> dict[str, str]:
    overall = row["overall"]
    ms, share = overall["cycle_ms"], overall["cycle_share"]
    stages = {name: f"{ms[s]:.2f} ({share[s]:.0%})" for s, name in STAGE_NAMES.items()}
    ends = {
        "overhead": f"{overall['overhead']:.0%}",
        "prefill": f"{overall['prefill_seconds']:.2f} s",
    }
    return {"cycle": f"{sum(ms.values()):.2f}"} | stages | ends


def _bound(row: Row) -> dict[str, str]:
    overall = row["overall"]
    speedup, bound = overall["decoding_speedup"], overall["bound"]
    return {
        "τ": interval(overall["acceptance_length"]),
        "speedup": interval(speedup),
        "bound": interval(bound),
        "speedup/bound": f"{speedup['value'] / bound['value']:.0%}" if speedup and bound else "",
    }


def forward_tables(summary: Summary) -> list[Table]:
    """The target's forward by nodes, and the head's two, a row a context; none without `--contexts`."""
    of_target: dict[tuple[str, int], str] = {("target", nodes): str(nodes) for nodes in NODES}
    of_head = {("begin", WAITING): f"begin, {WAITING} tokens"}
    of_head |= {("extend", nodes): f"level of {nodes}" for nodes in FRONTIERS}
    ms = {(f["context"], f["what"], f["nodes"]): f["ms"] for f in summary["forwards"]}
    contexts = list(dict.fromkeys(context for context, _, _ in ms))
    titles = {"The target's forward in ms, by nodes": of_target, "The head's step in ms": of_head}
    tables = []
    for title, columns in titles.items():
        rows = [
            [str(context), *(interval(ms.get((context, *column))) for column in columns)]
            for context in contexts
        ]
        tables.append(Table(title, ["Context"], list(columns.values()), rows))
    return [one for one in tables if any("".join(row[1:]) for row in one.rows)]
