"""Make tables, notes and plots of acceptance rates and of τ.

The layout of rates is that of Table 1 of Hu et al. 2025: a line for each method, with α* below the methods whose draws
have it, and a column for each temperature and number of draws. Published distributions have a line for each pair of
distributions and a column for each method. τ has a table for each temperature, and plots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from treespec.eval.acceptance.config import AcceptanceConfig, TauConfig
from treespec.eval.header import NOT_RECORDED, build_header
from treespec.eval.report import Cell, EvalPage, EvalReport, Plot, Table, list_notes, to_percent

Row = dict[
    str, Any
]  # as `treespec.eval.acceptance.rates.build_rate_rows` or `build_tau_rows` makes it
FIGURE_KINDS = {  # field of a row -> heading of its table
    "rate": "Acceptance rate α in %",
    "gap": "Gap to the optimum, in points",
}
TAU_TITLE = "τ (tokens per cycle)"
SHORT_LABELS = {"temperature": "T", "draws": "K"}
METHOD_NAMES = {"α* tops and tail": "α*, top tokens + residual draw"}  # in a row -> in a table
MAX_SHOWN_DEPTHS = 8  # a table has α at this many depths


def build_acceptance_page(result: dict[str, Any]) -> EvalPage:
    """Make the page of OUT/acceptance.json. Published distributions are no sample of questions."""
    number = None
    first_row = result["sweeps"][0][0]
    if first_row["positions"] > 1:
        number = first_row["groups"]
    date = result.get("date", NOT_RECORDED)
    header = build_header(
        "acceptance", AcceptanceConfig, result["config"], result["environment"], number, date
    )
    return EvalPage("Acceptance rates", header, build_acceptance_report(result))


def build_acceptance_report(result: dict[str, Any]) -> EvalReport:
    """Make the tables and notes of acceptance rates."""
    tables = []
    sampled = []
    for rows in result["sweeps"]:
        for kind in FIGURE_KINDS:
            tables.append(build_sweep_table(rows, kind))
        sampled += [row for row in rows if row["noise"]]
    first = result["sweeps"][0][0]
    omitted = describe_omitted(result["left_out"], result.get("left_out_draws", {}))
    notes = list_notes(
        "acceptance/notes.txt", **result, sampled=sampled, first=first, omitted=omitted
    )
    return EvalReport(tables, notes)


def describe_omitted(
    reasons: Mapping[str, str], draws: Mapping[str, Sequence[int]]
) -> dict[str, list[str]]:
    """Describe the schemes that were left out: "at K=2, 4" -> each with its reason, "single (…)"."""
    omitted: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        place = ""
        if name in draws:
            place = f" at K={', '.join(map(str, draws[name]))}"
        short_reason, _, _ = reason.removeprefix(f"verifier {name} ").partition(", not ")
        omitted.setdefault(place, []).append(f"{name} ({short_reason})")
    return omitted


def build_sweep_table(rows: Sequence[Row], kind: str) -> Table:
    """Make the table of a sweep's rates or gaps. kind: a key of `FIGURE_KINDS`."""
    are_distributions_given = set(rows[0]["at"]) > {"temperature", "draft", "draws"}
    lines: dict[str, dict[str, Cell]] = {}
    for row in rows:
        line = name_method(row["method"])
        column = name_place(row["at"])
        if are_distributions_given:
            line, column = column, line
        if row[kind] is not None:
            lines.setdefault(line, {"": line})[column] = to_percent(row[kind])
    return Table(FIGURE_KINDS[kind], [""], list(lines.values()))


def name_method(method: str) -> str:
    """Format a scheme, or α* with how its draws are made, such as "α* with replacement"."""
    for words, name in METHOD_NAMES.items():
        method = method.replace(words, name)
    return method


def name_place(at: Mapping[str, Any]) -> str:
    """Format the coordinates of a row, such as "T=0.6 K=2"."""
    words = []
    for name, coordinate in at.items():
        if coordinate != "same":
            value = f"{coordinate:.3g}" if isinstance(coordinate, float) else coordinate
            words.append(f"{SHORT_LABELS.get(name, name)}={value}")
    return " ".join(words)


def build_tau_page(result: Mapping[str, Any]) -> EvalPage:
    """Make the page of OUT/tau.json."""
    rows = result["rows"]
    header = build_header(
        "tau",
        TauConfig,
        result["config"],
        result["environment"],
        rows[0].get("questions"),
        result.get("date", NOT_RECORDED),
    )
    return EvalPage("Tokens per cycle", header, report_of_tau(result))


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
        plots.append(Plot(title, "nodes of the tree", TAU_TITLE, lines))
    for tree in dict.fromkeys(row["tree"] for row in result["rows"]):
        lines = collect_plot_lines(result, labels, "temperature", tree=tree)
        plots.append(Plot(f"τ by temperature, {tree}", "temperature", TAU_TITLE, lines))
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
    lines += describe_simulated(result["rows"])
    lines += describe_bounds(result["rows"])
    for name, reason in result["left_out"].items():
        lines.append(f"Left out: {name}, as {reason}.")
    return lines


def describe_simulated(rows: Sequence[Row]) -> list[str]:
    """Write the note about verifiers that wrote answers of their own. No note if none did."""
    answers = {row["verifier"]: row["answers"] for row in rows if row.get("answers")}
    lines = []
    for name, count in answers.items():
        written = "an answer"
        if count > 1:
            written = f"{count} answers"
        lines.append(
            f"Simulated: {name} judges whole trees, so its cycles are counted in {written} of its own to each prompt. "
            "Its ranges hold the error of that; more --samples make them narrower."
        )
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
