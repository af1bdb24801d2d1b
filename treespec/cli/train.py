"""`treespec train`: a draft head for a target, from conversations."""

from pathlib import Path

import typer

from treespec.cli.early import begin, check_data, folder_of
from treespec.cli.options import takes
from treespec.cli.terminal import end_notice
from treespec.draft.checks import check_width
from treespec.train.config import TrainConfig, check_folders


@takes(TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a draft head for a target. Run it again after a kill and it goes on.

    With several processes: accelerate launch -m treespec.train --target …
    """
    check_folders(config)
    check_data(config.data)
    begin(config)
    if config.from_head is not None:
        check_width(config.from_head, folder_of(config.target))
    from treespec.train.run import train

    end_notice()
    try:
        train(config)
    except KeyboardInterrupt:
        print(f"\n{stopped(config)}")
        raise typer.Exit(130) from None


def stopped(config: TrainConfig) -> str:
    """What the same command does after an interrupt."""
    from treespec.train.checkpoints import latest_step

    step = latest_step(Path(config.out) / "training")
    if step is None:
        first = f"The first checkpoint would have been at step {config.checkpoint_every}"
        return f"Stopped. {first}: the same command begins again."
    return (
        f"Stopped. The same command goes on from step {step}, the last checkpoint in {config.out}."
    )
