"""`treespec bench`: where the time goes, beside the bound of the speedup and transformers' own generation."""

from treespec.cli.options import takes
from treespec.eval.bench_config import BenchConfig


@takes(BenchConfig)
def bench(config: BenchConfig) -> None:
    """Measure forwards, cycles and peers in one run, also on a target made costlier by layers that change nothing."""
    from pathlib import Path

    from rich.console import Console

    from treespec.cli.progress import with_progress
    from treespec.eval.bench import bench as run
    from treespec.eval.bench_table import markdown, show

    console = Console()
    result = with_progress(console, lambda report: run(config, report))
    if console.is_terminal:
        show(result, console)
    else:
        print(markdown(result))
    if result["plots"] is None:
        print("No plots, as matplotlib is not installed: pip install 'treespec[plots]'")
    print(f"Times are in {Path(config.out).resolve()}")
