"""`treespec acceptance`: what verifiers accept of a head's drafts, beside what any could."""

from treespec.cli.early import check_folder, check_readable, check_sources
from treespec.cli.options import takes
from treespec.cli.terminal import notice
from treespec.eval.acceptance.config import AcceptanceConfig


@takes(AcceptanceConfig)
def acceptance(config: AcceptanceConfig) -> None:
    """Measure acceptance rates and their optima, on a head's laws or on given ones."""
    check_folder(config.out)
    check_readable(text=config.text, laws=config.laws)
    if config.target and not config.given_laws:
        check_sources(config.target, config.head)
    notice(f"loading {config.target or config.laws or config.preset} …")
    from pathlib import Path

    from treespec.cli.progress import remark, show_result, with_progress
    from treespec.eval.acceptance.run import accept
    from treespec.eval.acceptance.table import report_of

    result = with_progress(lambda report: accept(config, report))
    show_result(report_of(result))
    if result["plots"] is None:
        remark("No plots, as matplotlib is not installed: pip install 'treespec[plots]'")
    remark(f"Rates are in {Path(config.out).resolve()}")
