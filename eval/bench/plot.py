"""The plot of a benchmark, where matplotlib is installed."""

from pathlib import Path

from treespec.eval.bench.result import BenchResult
from treespec.files import writing

FORWARDS = "bench-forwards.png"


def plot(result: BenchResult, out: Path) -> list[str] | None:
    """Write OUT/bench-forwards.png: ms of the target's forward by nodes, a line a context.

    Returns the names of the files; None without matplotlib.
    """
    # 1. A line per context.
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    forwards = [f for f in result["forwards"] if f["what"] == "target"]
    for context in dict.fromkeys(f["context"] for f in forwards):
        line = [f for f in forwards if f["context"] == context]
        nodes, ms = [f["nodes"] for f in line], [f["ms"]["value"] for f in line]
        panel.plot(nodes, ms, "o-", ms=3, label=f"target, context {context}")

    # 2. Axes and file.
    panel.set_xscale("log", base=2)
    panel.set(xlabel="nodes", ylabel="ms", ylim=(0, None))
    figure.legend(loc="outside right upper", fontsize="small")
    with writing(out / FORWARDS) as file:
        figure.savefig(file, dpi=150, format="png")
    return [FORWARDS]
