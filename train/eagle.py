"""EAGLE-1's loss: the features that follow, and the token laws that they lead to.

Five tokens, of which d and e are the assistant's:

    token          a  b  c  d  e           a pair learns the next feature, and through it the law of
    pair (f, tok)     f0,b f1,c f2,d       the token two places on; it counts if that token is the
    gives             f1'  f2'  f3'        assistant's: f1' for d and f2' for e
    law of            c    d    e
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.target import Target
from treespec.train.config import TrainConfig
from treespec.train.loss import Batch, Loss


def eagle_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """`eagle_loss` of a batch, with noise on the features that the head sees. model: the head."""
    noise = torch.rand(batch.features[:, :-2].shape, generator=batch.generator) * 2 - 1
    noise = noise * (config.noise * 512 / batch.lengths)[:, None, None]
    noisy = batch.features[:, :-2].float() + noise.to(batch.features.device)
    extrapolated = model(
        batch.tokens[:, 1:-1], noisy, torch.arange(noisy.shape[1], device=noisy.device)
    )
    counts = counted(batch.loss_mask)
    if (
        not counts.any()
    ):  # answers cut to their first token: nothing to learn, but every process takes part
        counts = torch.ones_like(counts)
    return eagle_loss(
        extrapolated[counts],
        batch.features[:, 1:-1][counts],
        target.output_logits,
        config.feature_weight,
        config.token_weight,
    )


def counted(loss_mask: Tensor) -> Tensor:
    """[B, T] bool, true at the assistant's tokens -> [B, T - 2], which pairs count."""
    return loss_mask[:, 2:]


def eagle_loss(
    extrapolated: Tensor,
    features: Tensor,
    output_logits: Callable[[Tensor], Tensor],
    feature_weight: float,
    token_weight: float,
) -> Loss:
    """SmoothL1 between features, plus cross-entropy of token laws (Li et al. 2024, section 4.2).

    extrapolated: [M, H] what the head gave at the counted positions. features: [M, H] what the
    target has there.
    output_logits: [M, H] -> [M, V] logits, the target's own output path.
    """
    target_logits = output_logits(features).float()
    head_logits = output_logits(extrapolated.to(features.dtype)).float()
    feature = F.smooth_l1_loss(extrapolated.float(), features.float())
    token = F.cross_entropy(head_logits, target_logits.softmax(-1))
    agreement = (head_logits.argmax(-1) == target_logits.argmax(-1)).float().mean()
    parts = {"feature": feature, "token": token, "agreement": agreement}
    return Loss(feature_weight * feature + token_weight * token, parts)
