"""Plots of a benchmark, where matplotlib is installed."""

from pathlib import Path
from typing import Any

from treespec.eval.bench.rows import ONE_TOKEN, label
from treespec.files import writing


def plot(result: dict[str, Any], out: Path) -> list[str] | None:
    """Write OUT/bench-forwards.png, and OUT/bench-speedup.png where layers were padded.

    Returns their names, None without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    for old in ("bench-forwards.png", "bench-speedup.png"):
        (out / old).unlink(missing_ok=True)
    drawn = {"bench-forwards.png": _forwards} | (
        {"bench-speedup.png": _speedup} if len(result["paddings"]) > 1 else {}
    )
    for name, draw in drawn.items():
        figure = Figure(figsize=(8, 4), layout="constrained")
        draw(figure, result["paddings"])
        with writing(out / name) as file:
            figure.savefig(file, dpi=150, format="png")
    return list(drawn)


def _forwards(figure: Any, paddings: list[dict[str, Any]]) -> None:
    """T(n) by nodes, a line a context and number of padded layers."""
    part = figure.subplots()
    for measured in paddings:
        found = [f for f in measured["forwards"] if f["what"] == "target"]
        for context in dict.fromkeys(f["context"] for f in found):
            line = [f for f in found if f["context"] == context]
            name = f"{label('target', measured['added'])}, context {context}"
            part.plot(
                [f["nodes"] for f in line], [f["ms"]["value"] for f in line], "o-", ms=3, label=name
            )
    part.set_xscale("log", base=2)
    part.set(xlabel="nodes", ylabel="ms", ylim=(0, None))
    figure.legend(loc="outside right upper", fontsize="small")


def _speedup(figure: Any, paddings: list[dict[str, Any]]) -> None:
    """Speedup, its bound and τ by the number of padded layers, a panel a temperature."""
    lines: dict[tuple[float, str], list[tuple[int, dict[str, Any]]]] = {}
    for measured in paddings:
        for row in measured["rows"]:
            if row["cycle"] and row["name"] != ONE_TOKEN:
                lines.setdefault((row["temperature"], row["name"]), []).append(
                    (measured["added"], row["cycle"])
                )
    heats = list(dict.fromkeys(heat for heat, _ in lines))
    parts = dict(
        zip(heats, figure.subplots(1, len(heats), sharey=True, squeeze=False)[0], strict=True)
    )
    for heat, part in parts.items():
        part.set(title=f"temperature {heat:g}", xlabel="layers padded")
    for (heat, name), points in lines.items():
        added, cycles = zip(*points, strict=True)
        values = {
            what: [cycle[what]["value"] for cycle in cycles]
            for what in ("speedup", "bound", "acceptance_length")
        }
        drawn = parts[heat].plot(added, values["speedup"], "o-", ms=3, label=name)
        for what, style in (("bound", "--"), ("acceptance_length", ":")):
            parts[heat].plot(added, values[what], style, color=drawn[0].get_color())
    parts[heats[0]].set_ylabel("speedup; -- its bound, ·· τ")
    parts[heats[0]].legend(fontsize="small")
