"""Make tables, notes and plots of acceptance rates and of τ.

The layout of rates is that of Table 1 of Hu et al. 2025: a line for each method, with α* below the methods whose draws
have it, and a column for each temperature and number of draws. Published distributions have a line for each pair of
distributions and a column for each method. τ has a table for each temperature, and plots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from treespec.eval.report import Cell, EvalReport, Plot, Table, list_notes, to_percent

Row = dict[
    str, Any
]  # as `treespec.eval.acceptance.rates.build_rate_rows` or `build_tau_rows` makes it
FIGURE_KINDS = {  # field of a row -> heading of its table
    "rate": "Acceptance rate α in %",
    "gap": "Below α* of its own draws, in points",
}
SHORT_LABELS = {"temperature": "T", "draws": "K"}
MAX_SHOWN_DEPTHS = 8  # a table has α at this many depths


def build_acceptance_report(result: dict[str, Any]) -> EvalReport:
    """Make the report of acceptance rates, for OUT/acceptance.md, OUT/acceptance.html and the terminal."""
    tables = []
    sampled = []
    for rows in result["sweeps"]:
        for kind in FIGURE_KINDS:
            tables.append(build_sweep_table(rows, kind))
        sampled += [row for row in rows if row["noise"]]
    first = result["sweeps"][0][0]
    return EvalReport(
        tables, list_notes("acceptance/notes.txt", **result, sampled=sampled, first=first)
    )


def build_sweep_table(rows: Sequence[Row], kind: str) -> Table:
    """Make the table of a sweep's rates or gaps. kind: a key of `FIGURE_KINDS`."""
    are_distributions_given = set(rows[0]["at"]) > {"temperature", "draft", "draws"}
    lines: dict[str, dict[str, Cell]] = {}
    for row in rows:
        line = row["method"]
        column = name_place(row["at"])
        if are_distributions_given:
            line, column = column, line
        if row[kind] is not None:
            lines.setdefault(line, {"": line})[column] = to_percent(row[kind])
    return Table(FIGURE_KINDS[kind], [""], list(lines.values()))


def name_place(at: Mapping[str, Any]) -> str:
    """Format the coordinates of a row, such as "T=0.6 K=2"."""
    words = []
    for name, coordinate in at.items():
        if coordinate != "same":
            value = f"{coordinate:.3g}" if isinstance(coordinate, float) else coordinate
            words.append(f"{SHORT_LABELS.get(name, name)}={value}")
    return " ".join(words)


def report_of_tau(result: Mapping[str, Any]) -> EvalReport:
    """Make the report of OUT/tau.json: a table for each temperature, plots of τ, and notes."""
    rows = result["rows"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    labels = ["tree", "verifier"]
    if len({row["drafter"] for row in rows}) > 1:
        labels = ["drafter", "tree", "verifier"]
    tables = [make_tau_table(rows, temperature, labels) for temperature in temperatures]
    return EvalReport(tables, list_tau_notes(result), plots=plot_tau(result, temperatures, labels))


def make_tau_table(rows: Sequence[Row], temperature: float, labels: Sequence[str]) -> Table:
    """Make the table of τ at one temperature. labels: the fields that name a row."""
    lines = list[Mapping[str, Cell]]()
    for row in rows:
        if row["temperature"] == temperature:
            cells: dict[str, Cell] = {name.capitalize(): row[name] for name in labels}
            cells["Nodes"] = f"{row['nodes']:.1f}"
            cells["τ"] = row["tau"]
            cells |= make_bound_cell(row)
            cells["Of the first"] = row["ratio"]
            for batch, speed in row["speed"].items():
                cells[f"Speed, batch {batch}"] = speed["over_one"]
            for depth, alpha in enumerate(row["alpha"][:MAX_SHOWN_DEPTHS], 1):
                cells[f"α {depth}"] = alpha
            lines.append(cells)
    columns = [name.capitalize() for name in labels]
    return Table(f"Tokens per cycle at temperature {temperature:g}", columns, lines)


def plot_tau(
    result: Mapping[str, Any], temperatures: Sequence[float], labels: Sequence[str]
) -> list[Plot]:
    """Plot τ by nodes at each temperature, and by temperature for each tree; plots without a line are left out."""
    plots = []
    for temperature in temperatures:
        title = f"τ by nodes, temperature {temperature:g}"
        lines = collect_plot_lines(result, labels, "nodes", temperature=temperature)
        plots.append(Plot(title, "nodes", lines))
    for tree in dict.fromkeys(row["tree"] for row in result["rows"]):
        lines = collect_plot_lines(result, labels, "temperature", tree=tree)
        plots.append(Plot(f"τ by temperature, {tree}", "temperature", lines))
    return [plot for plot in plots if max(map(len, plot.lines.values()), default=0) > 1]


def list_tau_notes(result: Mapping[str, Any]) -> list[str]:
    """List the notes on how to read the tables, and the pairs that were left out."""
    machine = "this machine"
    if result["config"]["bandwidth"]:
        machine = "a processor of the given figures"
    lines = [
        "τ: tokens by the expected number of cycles for the target's own texts; draws and coins are integrated out.",
        "Ranges: 95% intervals over questions, by jackknife. Of the first: τ by the first row's.",
        f"Speed: tokens a second over those of one token at a time, by the cost model of {machine}.",
        "α d: of the cycles that accept d - 1 tokens, the share that accepts d.",
    ]
    lines += describe_bounds(result["rows"])
    for name, reason in result["left_out"].items():
        lines.append(f"Left out: {name}, as {reason}.")
    return lines


def make_bound_cell(row: Row) -> dict[str, Cell]:
    """Make the cell of the bound of a row's draws; no cell if the bound is not known."""
    bound = row.get("bound")
    if not bound:
        return {}
    return {"Bound of its draws": bound}


def describe_bounds(rows: Sequence[Row]) -> list[str]:
    """Write the note about bounds: which verifiers have which draws. No note if no row has a bound."""
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


def collect_plot_lines(
    result: Mapping[str, Any], line_fields: Sequence[str], along: str, **field_values: Any
) -> dict[str, list[tuple[float, Any]]]:
    """Collect the lines of a plot of τ.

    Args:
        result: the content of OUT/tau.json.
        line_fields: the fields that name a line, except `tree`.
        along: the field of the horizontal axis.
        field_values: the values that some fields of a row must have.

    Returns:
        The points (x, τ) of each line by its name, x ascending.
    """
    lines: dict[str, list[tuple[float, Any]]] = {}
    for row in result["rows"]:
        if field_values.items() <= row.items():
            name = " ".join(row[part] for part in line_fields if part != "tree")
            lines.setdefault(name, []).append((row[along], row["tau"]))
    for points in lines.values():
        points.sort(key=lambda point: point[0])
    return lines
