"""The lab's rates as tables and notes.

The layout is that of Table 1 of Hu et al. 2025: a line per method, with α* below the methods that
draw in its way, and a column per temperature and number of draws. Given distributions have a line per distribution
and a column per method. τ has a table for each temperature, and plots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from treespec.eval.report import Cell, Plot, Report, Table, notes, percent

Row = dict[str, Any]  # one method at one combination, as `rows_of` makes it
KINDS = {  # of figures in a row, by what their tables are called
    "rate": "Acceptance rate α in %",
    "gap": "Below α* of its own draws, in points",
}
SHORT = {"temperature": "T", "draws": "K"}
SHOWN = 8  # depths whose α a table has


def report_of(result: dict[str, Any]) -> Report:
    """What OUT/acceptance.md, OUT/acceptance.html and the terminal show."""
    tables = [table_of(rows, kind) for rows in result["sweeps"] for kind in KINDS]
    sampled = [row for rows in result["sweeps"] for row in rows if row["noise"]]
    first = result["sweeps"][0][0]
    return Report(tables, notes("acceptance/notes.txt", **result, sampled=sampled, first=first))


def table_of(rows: Sequence[Row], kind: str) -> Table:
    """One kind of figures of a sweep."""
    by_pair = set(rows[0]["at"]) > {"temperature", "draft", "draws"}
    lines: dict[str, dict[str, Cell]] = {}
    for row in rows:
        at = {SHORT.get(name, name): x for name, x in row["at"].items() if x != "same"}
        texts = {name: f"{x:.3g}" if isinstance(x, float) else x for name, x in at.items()}
        place = " ".join(f"{name}={x}" for name, x in texts.items())  # T=0.6 K=2
        line, column = (place, row["method"]) if by_pair else (row["method"], place)
        if row[kind] is not None:
            lines.setdefault(line, {"": line})[column] = percent(row[kind])
    return Table(KINDS[kind], [""], [*lines.values()])


def report_of_tau(found: Mapping[str, Any]) -> Report:
    """A table by temperature, τ by temperature and by number of nodes, and how to read them."""
    # 1. The tables.
    heats = list(dict.fromkeys(row["temperature"] for row in found["rows"]))
    tables = []
    several = len({row["drafter"] for row in found["rows"]}) > 1
    naming = ["drafter", "tree", "verifier"] if several else ["tree", "verifier"]
    for heat in heats:
        lines = list[Mapping[str, Cell]]()
        for row in found["rows"]:
            if row["temperature"] == heat:
                cells: dict[str, Cell] = {name.capitalize(): row[name] for name in naming}
                cells |= {
                    "Nodes": f"{row['nodes']:.1f}",
                    "τ": row["tau"],
                    **make_bound_cell(row),
                    "Of the first": row["ratio"],
                }
                for batch, speed in row["speed"].items():
                    cells |= {f"Speed, batch {batch}": speed["over_one"]}
                alphas = {f"α {d}": alpha for d, alpha in enumerate(row["alpha"][:SHOWN], 1)}
                lines.append(cells | alphas)
        title = f"Tokens per cycle at temperature {heat:g}"
        tables.append(Table(title, [name.capitalize() for name in naming], lines))

    # 2. The plots: a line for each verifier over trees, and for each pair over temperatures.
    plots = [
        Plot(
            f"τ by nodes, temperature {heat:g}",
            "nodes",
            lines_of(found, naming, "nodes", temperature=heat),
        )
        for heat in heats
    ]
    plots += [
        Plot(
            f"τ by temperature, {tree}",
            "temperature",
            lines_of(found, naming, "temperature", tree=tree),
        )
        for tree in dict.fromkeys(row["tree"] for row in found["rows"])
    ]

    # 3. The notes.
    machine = "a processor of the given figures" if found["config"]["bandwidth"] else "this machine"
    notes = [
        "τ: tokens by the expected number of cycles for the target's own texts; draws and coins are integrated out.",
        "Ranges: 95% intervals over questions, by jackknife. Of the first: τ by the first row's.",
        f"Speed: tokens a second over those of one token at a time, by the cost model of {machine}.",
        "α d: of the cycles that accept d - 1 tokens, the share that accepts d.",
        *describe_bounds(found["rows"]),
        *(f"Left out: {name}, as {why}." for name, why in found["left_out"].items()),
    ]
    return Report(
        tables,
        notes,
        plots=[plot for plot in plots if any(len(x) > 1 for x in plot.lines.values())],
    )


def make_bound_cell(row: Row) -> dict[str, Cell]:
    """The bound of a row's own draws, where it is known."""
    bound = row.get("bound")
    return {"Bound of its draws": bound} if bound else {}


def describe_bounds(rows: Sequence[Row]) -> list[str]:
    """What the bounds are of, where there are any."""
    verifiers: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("bound"):
            verifiers.setdefault(row["draws"], {})[row["verifier"]] = None
    if not verifiers:
        return []
    draws = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in verifiers.items())
    return [
        "Bound of its draws: no lossless verifier of the same draws has a larger τ on these texts, whatever it looks "
        f"at; the best one may have less. Draws {draws}."
    ]


def lines_of(
    found: Mapping[str, Any], by: Sequence[str], along: str, **where: Any
) -> dict[str, list[tuple[float, Any]]]:
    """{name: (place, τ) in order} of the rows with these fields."""
    lines: dict[str, list[tuple[float, Any]]] = {}
    for row in found["rows"]:
        if all(row[name] == value for name, value in where.items()):
            name = " ".join(row[part] for part in by if part != "tree")
            lines.setdefault(name, []).append((row[along], row["tau"]))
    return {name: sorted(line, key=lambda point: point[0]) for name, line in lines.items()}
