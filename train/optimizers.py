"""What moves the weights of a head: AdamW, or Muon for its matrices beside AdamW for all else.

Muon (Jordan et al. 2024) gives each matrix an update whose singular values are all about 1. Matrices with a row for
each token, such as embeddings and output layers, keep AdamW, and so do norms and biases; speculators divides weights
so (documentation of `train.py`, read on 2026-11-30). An update is scaled to the size of AdamW's (Liu et al. 2025,
2502.16982), so that the same rate and weight decay hold for both.
"""

import math
from typing import Any, final

import torch
from torch import Tensor, nn

from treespec.heads.conditional import ConditionalBlockHead
from treespec.heads.eagle4 import Eagle4Head
from treespec.heads.head import Head
from treespec.kernels.processor import is_bfloat16_fast
from treespec.train.config import TrainConfig

ADAMW_BETA1 = 0.9
MATCHED_RMS = 0.2  # root mean square of AdamW's updates over the rate, which Muon's are scaled to
MIN_NORM = 1e-7


@final
class Float32Muon(torch.optim.Muon):
    """torch's Muon with Nesterov's momentum, and products in float32 instead of bfloat16.

    A processor without instructions for bfloat16 takes about twenty times as long for them.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """As `torch.optim.Muon.step`, without a closure."""
        assert closure is None, "the loss is computed before the step"
        for group in self.param_groups:
            rate = group["lr"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                momentum = state["momentum_buffer"]
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                direction = weight.grad.lerp(momentum, group["momentum"])
                update = normalize_spectrum(direction, group["ns_coefficients"], group["ns_steps"])
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-rate * MATCHED_RMS * math.sqrt(max(weight.shape)))


def normalize_spectrum(
    matrix: Tensor, coefficients: tuple[float, float, float], rounds: int
) -> Tensor:
    """Bring the singular values of a matrix near 1, by Newton-Schulz iterations (Jordan et al. 2024).

    A round turns each singular value s into a s + b s^3 + c s^5.

    Args:
        matrix: [A, B].
        coefficients: a, b and c.
        rounds: the number of iterations.
    """
    a, b, c = coefficients
    x = matrix / matrix.norm().clamp(min=MIN_NORM)  # no singular value is above 1
    if len(x) > x.shape[1]:
        x = x.T  # the smaller Gram matrix
    for _ in range(rounds):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    if x.shape != matrix.shape:
        x = x.T
    return x


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
    muon_class = torch.optim.Muon
    if not is_bfloat16_fast():
        muon_class = Float32Muon
    muon = muon_class(
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
