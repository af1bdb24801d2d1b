"""`treespec train`: a draft head for a target, from conversations."""

import typer

from treespec.cli.options import takes
from treespec.train.config import TrainConfig


@takes(TrainConfig)
def train(config: TrainConfig) -> None:
    """Train a draft head for a target. Run it again after a kill and it goes on.

    With several processes: accelerate launch -m treespec.train --target …
    """
    from treespec.train.run import train

    try:
        train(config)
    except KeyboardInterrupt:
        print(f"\nStopped. The same command goes on from the last checkpoint in {config.out}.")
        raise typer.Exit(130) from None
