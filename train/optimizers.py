"""What moves the weights of a head: AdamW, or Muon for its matrices beside AdamW for all else.

Muon (Jordan et al. 2024) gives each matrix an update whose singular values are all about 1. Matrices with a row for
each token, such as embeddings and output layers, keep AdamW, and so do norms and biases; speculators divides weights
so (documentation of `train.py`, read on 2026-11-30). An update is scaled to the size of AdamW's (Liu et al. 2025,
2502.16982), so that the same rate and weight decay hold for both.
"""

from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.heads.conditional import ConditionalBlockHead
from treespec.heads.eagle4 import Eagle4Head
from treespec.heads.head import Head
from treespec.train.config import TrainConfig

ADAMW_BETA1 = 0.9


@final
class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for matrices and AdamW for other weights, as one optimizer with their groups and states.

    Args:
        muon: optimizes the matrices.
        adamw: optimizes the other weights.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self.share_state()

    def share_state(self) -> None:
        """Let both parts work on the groups and states of this optimizer."""
        first = 0
        for part in self.parts:
            end = first + len(part.param_groups)
            part.param_groups = self.param_groups[first:end]
            part.state = self.state
            first = end

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `Optimizer.load_state_dict`."""
        super().load_state_dict(state_dict)
        self.share_state()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all weights that have gradients. closure: not supported, must be None."""
        assert closure is None, "the loss is computed before the step"
        for part in self.parts:
            part.step()


def build_optimizer(config: TrainConfig, head: Head) -> torch.optim.Optimizer:
    """Build the optimizer of the weights that are trained, by the run's recipe.

    Args:
        config: the run's options.
        head: the head; frozen weights stay as they are.
    """
    recipe = config.hyperparameters
    matrices: list[Tensor] = []
    if config.optimizer == "muon":
        matrices = list_matrices(head)
    taken = {id(weight) for weight in matrices}
    others = [
        weight for weight in head.parameters() if weight.requires_grad and id(weight) not in taken
    ]

    def build_adamw(weights: list[nn.Parameter]) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            weights,
            lr=recipe.learning_rate,
            betas=(ADAMW_BETA1, recipe.beta2),
            weight_decay=recipe.weight_decay,
        )

    if not matrices:
        return build_adamw(others)
    muon = torch.optim.Muon(
        matrices,
        lr=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, build_adamw(others))


def list_matrices(head: Head) -> list[Tensor]:
    """List the trained matrices without a row for each token, and without single rows or columns."""
    excluded = {id(module.weight) for module in list_vocabulary_modules(head)}
    matrices: list[Tensor] = []
    for weight in head.parameters():
        is_matrix = weight.ndim == 2 and min(weight.shape) > 1
        if weight.requires_grad and is_matrix and id(weight) not in excluded:
            matrices.append(weight)
    return matrices


def list_vocabulary_modules(head: Head) -> list[Any]:
    """List the modules whose weight has a row for each token: embeddings, output layers, factors of logits."""
    modules: list[Any] = [module for module in head.modules() if isinstance(module, nn.Embedding)]
    modules += head.output_layers
    if isinstance(head, ConditionalBlockHead):
        modules += head.drafted_rows + head.token_rows
    if isinstance(head, Eagle4Head):
        modules.append(head.efficient_lm_head)
    return modules
