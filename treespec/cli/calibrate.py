"""`treespec calibrate`: what a head's laws promise, for sampled trees."""

from treespec.cli.options import takes
from treespec.eval.calibrate_config import CalibrateConfig


@takes(CalibrateConfig)
def calibrate(config: CalibrateConfig) -> None:
    """Fit the chances that --tree sampled goes by. Training does it too, on held-out conversations."""
    from rich.console import Console

    from treespec.cli.progress import with_progress
    from treespec.eval.calibrate import calibrate_head

    file = with_progress(Console(), lambda report: calibrate_head(config, report))
    print(f"Calibration is in {file.resolve()}")
