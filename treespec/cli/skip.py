"""`treespec skip`: sublayers that a target skips to draft for itself (--drafter self:FILE)."""

from pathlib import Path

from treespec.cli.early import begin, check_pairing, check_text
from treespec.cli.options import takes
from treespec.eval.config import SkipConfig
from treespec.files.atomic import check_writable


@takes(SkipConfig)
def skip(config: SkipConfig) -> None:
    """Search for the sublayers whose skipping makes a target draft fastest. Nothing is trained."""
    check_writable(config.out, "--out")
    check_text(config.text)
    begin(config)
    check_pairing(f"self:{config.out}", config.tree, "auto", allow_lossy=False)
    from treespec.cli.terminal import with_progress
    from treespec.eval.skip_search import search_skip_set

    found = with_progress(lambda report: search_skip_set(config, report))
    print(
        f"{found['tokens_per_second']:.1f} tokens/s without {len(found['attention'])} attentions "
        f"and {len(found['mlp'])} MLPs of {found['layers']} layers, {found['one_at_a_time']:.1f} "
        "one at a time"
    )
    print(f"The skip set is in {Path(config.out).resolve()}")
