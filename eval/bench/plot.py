"""Plots of a benchmark, where matplotlib is installed."""

from pathlib import Path
from typing import TYPE_CHECKING

from treespec.eval.bench.result import BenchResult, CycleFigures, Padding
from treespec.eval.bench.rows import ONE_TOKEN, label
from treespec.files import writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORWARDS, SPEEDUP = "bench-forwards.png", "bench-speedup.png"


def plot(result: BenchResult, out: Path) -> list[str] | None:
    """Write OUT/bench-forwards.png, and OUT/bench-speedup.png if layers were added.

    Returns the names of the files; None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    for name in (FORWARDS, SPEEDUP):
        (out / name).unlink(missing_ok=True)
    plots = {FORWARDS: draw_forwards}
    if len(result["paddings"]) > 1:
        plots[SPEEDUP] = draw_speedup
    for name, draw in plots.items():
        figure = Figure(figsize=(8, 4), layout="constrained")
        draw(figure, result["paddings"])
        with writing(out / name) as file:
            figure.savefig(file, dpi=150, format="png")
    return list(plots)


def draw_forwards(figure: "Figure", paddings: list[Padding]) -> None:
    """Milliseconds of the target's forward by nodes; a line per context and number of layers."""
    panel = figure.subplots()
    for measured in paddings:
        forwards = [f for f in measured["forwards"] if f["what"] == "target"]
        for context in dict.fromkeys(f["context"] for f in forwards):
            line = [f for f in forwards if f["context"] == context]
            nodes, ms = [f["nodes"] for f in line], [f["ms"]["value"] for f in line]
            name = f"{label('target', measured['added'])}, context {context}"
            panel.plot(nodes, ms, "o-", ms=3, label=name)
    panel.set_xscale("log", base=2)
    panel.set(xlabel="nodes", ylabel="ms", ylim=(0, None))
    figure.legend(loc="outside right upper", fontsize="small")


def draw_speedup(figure: "Figure", paddings: list[Padding]) -> None:
    """Speedup, its bound and τ by the number of added layers; a panel per temperature."""
    # 1. The points of each line: (added layers, figures of a cycle).
    lines: dict[tuple[float, str], list[tuple[int, CycleFigures]]] = {}
    for measured in paddings:
        for row in measured["rows"]:
            if row["cycle"] and row["name"] != ONE_TOKEN:
                line = lines.setdefault((row["temperature"], row["name"]), [])
                line.append((measured["added"], row["cycle"]))

    # 2. Panels.
    temperatures = list(dict.fromkeys(temperature for temperature, _ in lines))
    axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    panels = dict(zip(temperatures, axes, strict=True))
    for temperature, panel in panels.items():
        panel.set(title=f"temperature {temperature:g}", xlabel="layers padded")

    # 3. Lines.
    for (temperature, name), points in lines.items():
        panel, added = panels[temperature], [layers for layers, _ in points]
        speedups = [cycle["speedup"]["value"] for _, cycle in points]
        bounds = [cycle["bound"]["value"] for _, cycle in points]
        taus = [cycle["acceptance_length"]["value"] for _, cycle in points]
        (drawn,) = panel.plot(added, speedups, "o-", ms=3, label=name)
        panel.plot(added, bounds, "--", color=drawn.get_color())
        panel.plot(added, taus, ":", color=drawn.get_color())
    panels[temperatures[0]].set_ylabel("speedup; -- its bound, ·· τ")
    panels[temperatures[0]].legend(fontsize="small")
