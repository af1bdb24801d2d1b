"""Plots of rates, where matplotlib is installed: whatever took three values or more becomes an axis."""

from itertools import cycle
from pathlib import Path
from typing import Any

from treespec.eval.acceptance.table import in_order, label, place_of
from treespec.files import writing

Row = dict[str, Any]
AXES = {"temperature": "temperature", "draft": "draft temperature", "draws": "number of draws"}


def plot(sweeps: list[list[Row]], out: Path) -> list[str] | None:
    """Write OUT/acceptance-1-by-….png and so on, with a panel a value of the rest.

    Returns their names, None without matplotlib.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    for old in out.glob("acceptance-*-by-*.png"):
        old.unlink()
    files = []
    for number, rows in enumerate(sweeps, start=1):
        for axis in axes(rows):
            groups = panels(rows, axis)
            figure = Figure(figsize=(3 + 4 * len(groups), 4), layout="constrained")
            parts = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
            names = dict.fromkeys(name for lines in groups.values() for name in lines)
            colours = dict(zip(names, cycle(colormaps["tab20"].colors), strict=False))
            legend: dict[str, Any] = {}
            for part, (title, lines) in zip(parts, groups.items(), strict=True):
                for name, points in lines.items():
                    style: dict[str, Any] = (
                        {"fmt": "--"} if name.startswith("α*") else {"fmt": "o-", "ms": 3}
                    )
                    style["color"] = colours[name]
                    if axis in points[0]["at"]:
                        x = [point["at"][axis] for point in points]
                        errors = [point["rate"]["error"] or 0 for point in points]
                        part.errorbar(
                            x, [p["rate"]["value"] for p in points], errors, label=name, **style
                        )
                    else:
                        part.axhline(
                            points[0]["rate"]["value"], color=colours[name], ls="--", label=name
                        )
                legend |= dict(zip(*reversed(part.get_legend_handles_labels()), strict=True))
                part.set(title=title, xlabel=AXES.get(axis, axis))
            parts[0].set_ylabel("acceptance rate")
            figure.legend(
                legend.values(), legend.keys(), loc="outside right upper", fontsize="small"
            )
            files.append(f"acceptance-{number}-by-{axis}.png")
            with writing(out / files[-1]) as file:
                figure.savefig(file, dpi=150, format="png")
    return files


def axes(rows: list[Row]) -> list[str]:
    """What takes three values or more among the places and the schemes' options."""
    places = [row["at"] | options(row) for row in rows]
    names = dict.fromkeys(name for place in places for name in place if name != "law")
    return [name for name in names if len({place.get(name) for place in places} - {None}) > 2]


def panels(rows: list[Row], axis: str) -> dict[str, dict[str, list[Row]]]:
    """Title -> line -> its rows along the axis; α* has no place on an axis that is an option of the schemes."""
    is_option = any(axis in options(row) for row in rows)
    found: dict[str, dict[str, list[Row]]] = {}
    for row in in_order(rows):
        place = row["at"] | options(row)
        if axis in place or (is_option and row["optimum"]):
            title = place_of(
                row, [n for n, value in row["at"].items() if n != axis and value != "same"], ", "
            )
            own = [f"{name}={value:g}" for name, value in options(row).items() if name != axis]
            name = " ".join([label(row).partition(":")[0], *own])
            found.setdefault(title, {}).setdefault(name, []).append(row | {"at": place})
    return found


def options(row: Row) -> dict[str, float]:
    """Of a method such as is-lp:s=8,alphabet=50."""
    _, _, rest = row["method"].partition(":")
    return {
        name: float(value)
        for name, _, value in (part.partition("=") for part in rest.split(",") if part)
    }
