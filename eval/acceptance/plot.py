"""Plots of rates, where matplotlib is installed: an axis for whatever takes three values."""

import re
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from treespec.eval.acceptance.rates import Row
from treespec.eval.acceptance.sources import Coordinates
from treespec.eval.acceptance.table import in_order, label, place_of
from treespec.files.atomic import writing

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

Lines = dict[str, list[Row]]  # the rows of each line, by its name in the legend
AXES = {"temperature": "temperature", "draft": "draft temperature", "draws": "number of draws"}


def plot(sweeps: list[list[Row]], out: Path) -> list[str] | None:
    """Write OUT/acceptance-1-by-….png and so on: a plot per sweep and axis.

    Returns the names of the files; None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    for old in out.glob("acceptance-*-by-*.png"):
        old.unlink()
    files = []
    for number, rows in enumerate(sweeps, start=1):
        for axis in axes(rows):
            titled = panels(rows, axis)
            figure = Figure(figsize=(3 + 4 * len(titled), 4), layout="constrained")
            draw(figure, titled, axis)
            files.append(f"acceptance-{number}-by-{axis}.png")
            with writing(out / files[-1]) as file:
                figure.savefig(file, dpi=150, format="png")
    return files


def draw(figure: "Figure", titled: dict[str, Lines], axis: str) -> None:
    """The panels side by side with error bars, with one legend and one colour per line.

    α* is dashed, and level if it has no place on the axis.
    """
    from matplotlib import colormaps

    names = dict.fromkeys(name for lines in titled.values() for name in lines)
    colours = dict(zip(names, cycle(colormaps["tab20"].colors), strict=False))
    parts = figure.subplots(1, len(titled), sharey=True, squeeze=False)[0]
    handles: dict[str, Artist] = {}
    for part, (title, lines) in zip(parts, titled.items(), strict=True):
        for name, rows in lines.items():
            rates, colour = [row["rate"]["value"] for row in rows], colours[name]
            if axis not in rows[0]["at"]:
                part.axhline(rates[0], color=colour, ls="--", label=name)
                continue
            places, errors = zip(
                *((row["at"][axis], row["rate"]["error"] or 0) for row in rows), strict=True
            )
            style = "--" if name.startswith("α*") else "o-"
            part.errorbar(places, rates, errors, fmt=style, ms=3, color=colour, label=name)
        drawn, labels = part.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
        part.set(title=title, xlabel=AXES.get(axis, axis))
    parts[0].set_ylabel("acceptance rate")
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")


def axes(rows: list[Row]) -> list[str]:
    """The coordinates and options of schemes that take three values or more."""
    places = [place_with_options(row) for row in rows]
    names = dict.fromkeys(name for place in places for name in place if name != "law")
    return [name for name in names if len({place.get(name) for place in places} - {None}) > 2]


def panels(rows: list[Row], axis: str) -> dict[str, Lines]:
    """Title -> name of a line -> its rows along the axis.

    α* has no value on an axis that is an option of the schemes, and stands in every panel.
    """
    is_option = any(axis in options_of(row) for row in rows)
    titled: dict[str, Lines] = {}
    for row in in_order(rows):
        place = place_with_options(row)
        if axis in place or (is_option and row["optimum"]):
            fixed = [name for name, v in row["at"].items() if name != axis and v != "same"]
            title = place_of(row, fixed, ", ")
            others = [f"{name}={v:g}" for name, v in options_of(row).items() if name != axis]
            name = " ".join([label(row).partition(":")[0], *others])
            moved: Row = {**row, "at": place}
            titled.setdefault(title, {}).setdefault(name, []).append(moved)
    return titled


def place_with_options(row: Row) -> Coordinates:
    """The row's coordinates, its scheme's options among them."""
    return {**row["at"], **options_of(row)}


def options_of(row: Row) -> dict[str, float]:
    """The options of a method such as is-lp:s=8,alphabet=50."""
    return {name: float(x) for name, x in re.findall(r"([\w-]+)=([^,]+)", row["method"])}
