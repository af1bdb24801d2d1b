"""`treespec acceptance`: what verifiers accept of a head's drafts, beside what any could."""

from treespec.cli.options import takes
from treespec.eval.acceptance_config import AcceptanceConfig


@takes(AcceptanceConfig)
def acceptance(config: AcceptanceConfig) -> None:
    """Measure acceptance rates and their optima, on a head's laws or on given ones."""
    from pathlib import Path

    from rich.console import Console

    from treespec.cli.progress import with_progress
    from treespec.eval.acceptance import accept
    from treespec.eval.acceptance_table import markdown, show

    console = Console()
    result = with_progress(console, lambda report: accept(config, report))
    if console.is_terminal:
        show(result, console)
    else:
        print(markdown(result))
    if result["plots"] is None:
        print("No plots, as matplotlib is not installed: pip install 'treespec[plots]'")
    print(f"Rates are in {Path(config.out).resolve()}")
