"""An evaluation as people read it: what OUT/report.md, OUT/report.html and the terminal show."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from treespec.eval.common import STAGE_NAMES, drafted_by
from treespec.eval.config import EvalConfig
from treespec.eval.contestants import batches_of
from treespec.eval.figures import FEW, Row, Summary
from treespec.eval.forwards import FRONTIERS, NODES, ROUNDS, WAITING
from treespec.eval.intervals import Figure
from treespec.eval.report import Report, Table, filled_in, percent, shown
from treespec.eval.verdict import batch_of, noise_of, several, short, tree_name, verdict

LABELS = ("Drafter", "Method", "Tree", "T", "Batch")

Cells = Callable[[Row], dict[str, str]]  # of a row, by column


def report_of(summary: Summary) -> Report:
    """Tables, notes and verdict."""
    # 1. Speed, of all questions and by category.
    rows, timed = summary["rows"], summary["timed"]
    own = [row for row in rows if not row["peer"]]
    checked = [row for row in rows if row["right"]]
    bounded = [row for row in own if row["drafter"]] if timed and compares(summary) else []
    more = [
        (
            ["", "baseline again", "", f"{again['temperature']:g}", batch_of(again, rows)],
            {"speedup": shown(again["speedup"])},
        )
        for again in summary["again"]
    ]
    more += [(["", name, "", "", ""], {"tokens/s": "failed"}) for name in summary["failed"]]
    title = "Acceptance length τ (tokens per target forward) and speed"
    drawn = {"τ": "acceptance_length", "speedup": "speedup"}
    of_all = {name: [row["overall"][which] for row in rows] for name, which in drawn.items()}
    taus = {
        name: [row["categories"][name]["acceptance_length"] for row in own]
        for name in rows[0]["categories"]
    }

    # 2. Right answers, what a cycle accepts and where its time goes, the bound of the speedup.
    many = timed and len(rows[0]["categories"]) > 1
    tables = [
        table(title, rows, speeds, of_all, more),
        table("By category: τ (speedup)", own, by_category(length), taus),
        table("By category: tokens/s", rows if many else [], by_category(tokens_per_second)),
        table("Right answers", checked, right),
        table("Acceptance rate α by depth", own, rates),
        table("A cycle's time in ms (share)", own if timed else [], cycle),
        table("Speedup without prompts, and its bound", bounded, bound),
        *forward_tables(summary["forwards"]),
    ]
    return Report(tables, notes(summary), verdict(summary))


def compares(summary: Summary) -> bool:
    """Whether the bound belongs to the report: peers, several verifiers or forwards are compared."""
    pairs = {(row["method"], row["tree"]) for row in summary["rows"] if row["drafter"]}
    options = summary["options"]
    compared = options["peers"] or options["contexts"] or len(pairs) > 1
    return bool(compared) and any(row["overall"]["bound"] for row in summary["rows"])


def table(
    title: str,
    rows: Sequence[Row],
    cells: Cells,
    bars: Mapping[str, Sequence[Figure | None]] = MappingProxyType({}),
    more: Sequence[tuple[list[str], dict[str, str]]] = (),
) -> Table:
    """A row for each contestant, labelled by what tells it from the others.

    bars: as of `Table`. more: labels and cells of further rows.
    """
    lines = []
    for row in rows:
        method = row["method"] + ("" if row["lossless"] else " (lossy)")
        method += f", {row['peer']}" if row["peer"] else ""
        drafter = short(row["drafter"]) if several(rows) else ""
        label = [drafter, method, tree_name(row["tree"]), f"{row['temperature']:g}"]
        lines.append(([*label, batch_of(row, rows)], cells(row)))
    lines += more
    columns = list(dict.fromkeys(name for _, own in lines for name in own))
    found = [[*label, *(own.get(name, "") for name in columns)] for label, own in lines]
    return Table(title, LABELS, columns, found, bars)


def speeds(row: Row) -> dict[str, str]:
    overall = row["overall"]
    alone = row["peer"] or row["batch"] == 1  # a batch shares its seconds out
    first = f"{overall['first_token']:.3f}" if alone and overall["first_token"] else ""
    return {
        "τ": shown(overall["acceptance_length"]),
        "tokens/s": shown(overall["tokens_per_second"], digits=1),
        "speedup": shown(overall["speedup"]),
        "by generate": shown(row["by_generate"]),
        "by the smallest batch": shown(row["over_smallest"]),
        "first token, s": first,
        "identical": "" if row["same"] is None else f"{row['same']} of {row['turns']}",
    }


def by_category(cell: Callable[[Row], str]) -> Cells:
    """A cell for each category, then one for all questions."""

    def cells(row: Row) -> dict[str, str]:
        groups = {**row["categories"], "overall": row["overall"]}
        return {name: cell(figures) for name, figures in groups.items()}

    return cells


def length(figures: Row) -> str:
    tau, speedup = (figures[name] for name in ("acceptance_length", "speedup"))
    return f"{value(tau)} ({value(speedup)})" if value(speedup) else value(tau)


def value(figure: Figure | None) -> str:
    """A figure without its interval."""
    return shown(figure).partition(" ")[0]


def tokens_per_second(figures: Row) -> str:
    return shown(figures["tokens_per_second"], digits=1)


def right(row: Row) -> dict[str, str]:
    right, same = row["right"], row["right"]["same"]
    return {
        "right": f"{right['right']} of {right['answers']}",
        "%": percent(right["share"]),
        "% less the baseline's": percent(right["difference"]),
        "same verdict": "" if same is None else f"{same} of {right['answers']}",
    }


def rates(row: Row) -> dict[str, str]:
    by_depth = enumerate(row["overall"]["acceptance_rate_by_depth"], 1)
    nodes = {"nodes": f"{row['overall']['nodes']:.0f}"}
    return nodes | {str(depth): shown(rate) for depth, rate in by_depth}


def cycle(row: Row) -> dict[str, str]:
    overall, ms = row["overall"], row["overall"]["cycle_ms"]
    whole = sum(ms.values())
    stages = {name: f"{ms[s]:.2f} ({ms[s] / whole:.0%})" for s, name in STAGE_NAMES.items()}
    ends = {
        "overhead": f"{1 - (ms['target'] + ms['head']) / whole:.0%}",
        "prefill": f"{overall['prefill_seconds']:.2f} s",
    }
    return {"cycle": f"{whole:.2f}"} | stages | ends


def bound(row: Row) -> dict[str, str]:
    overall = row["overall"]
    speedup, most = overall["decoding_speedup"], overall["bound"]
    return {
        "τ": shown(overall["acceptance_length"]),
        "speedup": shown(speedup),
        "bound": shown(most),
        "speedup/bound": f"{speedup['value'] / most['value']:.0%}" if speedup and most else "",
    }


def forward_tables(times: Sequence[dict[str, Any]]) -> list[Table]:
    """The target's forward by nodes, and the head's two, a row a context; none without `--contexts`."""
    columns = {
        "The target's forward in ms, by nodes": {("target", n): str(n) for n in NODES},
        "The head's step in ms": {
            ("begin", WAITING): f"begin, {WAITING} tokens",
            **{("extend", nodes): f"level of {nodes}" for nodes in FRONTIERS},
        },
    }
    ms = {(f["context"], f["what"], f["nodes"]): f["ms"] for f in times}
    contexts = list(dict.fromkeys(context for context, _, _ in ms))
    tables = []
    for title, works in columns.items():
        rows = [[str(at), *(shown(ms.get((at, *work))) for work in works)] for at in contexts]
        if any("".join(row[1:]) for row in rows):
            tables.append(Table(title, ["Context"], list(works.values()), rows))
    return tables


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
        rounds=ROUNDS,
        bounded=compares(summary),
        peers=any(row["peer"] for row in rows),
        checked=any(row["right"] for row in rows),
        batches=[batch for batch in batches_of(config) if batches_of(config)[-1] > 1],
        noises=[(again, noise_of(again["speedup"])) for again in summary["again"]],
        ended={cause: sum(row["ended"][end] for row in rows) for end, cause in ends.items()},
        turns=sum(row["turns"] for row in rows),
    )
    return [" ".join(note.split()) for note in text.split("\n\n") if note.strip()]
