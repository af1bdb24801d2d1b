"""`treespec bench`: where the time goes, the speedup's bound, and transformers' generation."""

from treespec.cli.early import begin, check_folder, check_questions, check_there
from treespec.cli.options import takes
from treespec.eval.bench.config import BenchConfig, check_verifiers


@takes(BenchConfig)
def bench(config: BenchConfig) -> None:
    """Time forwards, cycles and peers in one run."""
    check_folder(config.out)
    check_questions(config.questions)
    check_verifiers(config)
    begin(config, [config.source] if config.source else [], chats=True)
    if config.assistant is not None:
        check_there(config.assistant, "assistant directory")
    from pathlib import Path

    from treespec.cli.progress import remark, show_result, with_progress
    from treespec.eval.bench.run import bench as run
    from treespec.eval.bench.table import report_of

    result = with_progress(lambda report: run(config, report))
    show_result(report_of(result))
    remark(f"Times are in {Path(config.out).resolve()}; look at report.html there")
