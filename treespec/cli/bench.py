"""`treespec bench`: where the time goes, beside the bound of the speedup and transformers' own generation."""

from treespec.cli.early import check_folder, check_sources
from treespec.cli.options import takes
from treespec.cli.terminal import notice
from treespec.eval.bench.config import BenchConfig


@takes(BenchConfig)
def bench(config: BenchConfig) -> None:
    """Measure forwards, cycles and peers in one run, also on a target made costlier by layers that change nothing."""
    check_folder(config.out)
    check_sources(config.target, config.head, (config.drafter,) if config.drafter else ())
    notice(f"loading {config.target} …")
    from pathlib import Path

    from treespec.cli.progress import remark, show_result, with_progress
    from treespec.eval.bench.run import bench as run
    from treespec.eval.bench.table import report_of

    result = with_progress(lambda report: run(config, report))
    show_result(report_of(result))
    if result["plots"] is None:
        remark("No plots, as matplotlib is not installed: pip install 'treespec[plots]'")
    remark(f"Times are in {Path(config.out).resolve()}")
