"""EAGLE-1's loss: the features that follow, and the token laws that they lead to.

Five tokens, of which d and e are the assistant's:

    token          a  b  c  d  e           a pair learns the next feature, and through it the law of
    pair (f, tok)     f0,b f1,c f2,d       the token two places on; it counts if that token is the
    gives             f1'  f2'  f3'        assistant's: f1' for d and f2' for e
    law of            c    d    e

Later draft steps see the features that the head gave before (HASS, Zhang et al. 2024, 2408.15766):

    step 2            f1',c f2',d          gives f2'' f3'', laws of d and e
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.target import Target
from treespec.train.chunked import law_loss
from treespec.train.config import TrainConfig
from treespec.train.loss import Batch, Loss


def eagle_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """The sum over draft steps of decay^step times `eagle_loss`, and the parts of each.

    The features that the head sees at step 1 carry noise. model: the head.
    """
    # 1. what the head gives from every position
    noise = torch.rand(batch.features[:, :-2].shape, generator=batch.generator) * 2 - 1
    noise = noise * (config.noise * 512 / batch.lengths)[:, None, None]
    noisy = batch.features[:, :-2].float() + noise.to(batch.features.device)
    extrapolated = model(batch.tokens, noisy, batch.steps)

    # 2. against what the target has there
    # No position counts where answers are cut to their first token: the loss is 0 and still
    # depends on the head, so that this process takes part in the gradient's mean.
    counts = counted(batch.loss_mask)
    output_logits = (
        batch.law_tokens.logits(target, batch.generator)
        if batch.law_tokens
        else target.output_logits
    )
    total = noisy.new_zeros(())
    parts: dict[str, Tensor] = {}
    for step, given in enumerate(extrapolated):
        counting = counts[:, step:]
        loss = eagle_loss(
            given[counting],
            batch.features[:, 1 + step : -1][counting].to(target.dtype),
            output_logits,
            config.feature_weight,
            config.token_weight,
        )
        total = total + config.step_decay**step * loss.total
        parts |= {name if not step else f"{name}_{step + 1}": x for name, x in loss.parts.items()}
    return Loss(total, parts)


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

    extrapolated: [M, H] what the head gave at the counted positions; M may be 0. features: [M, H]
    what the target has there.
    output_logits: [M, H] -> [M, V] logits, the target's own output path.
    """
    count = max(extrapolated.numel(), 1)
    feature = F.smooth_l1_loss(extrapolated.float(), features.float(), reduction="sum") / count
    token, agreement = law_loss(extrapolated, features, output_logits)
    parts = {"feature": feature, "token": token, "agreement": agreement}
    return Loss(feature_weight * feature + token_weight * token, parts)
