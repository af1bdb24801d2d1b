"""What moves the weights of a head: AdamW."""

import torch

from treespec.heads.head import Head
from treespec.train.config import TrainConfig

ADAMW_BETA1 = 0.9


def build_optimizer(config: TrainConfig, head: Head) -> torch.optim.AdamW:
    """Build the optimizer of the weights that are trained, by the run's recipe.

    Args:
        config: the run's options.
        head: the head; frozen weights stay as they are.
    """
    recipe = config.hyperparameters
    return torch.optim.AdamW(
        [weight for weight in head.parameters() if weight.requires_grad],
        lr=recipe.learning_rate,
        betas=(ADAMW_BETA1, recipe.beta2),
        weight_decay=recipe.weight_decay,
    )
