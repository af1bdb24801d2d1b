"""EAGLE-1's loss: the features that follow, and the token laws that they lead to.

Five tokens, of which d and e are the assistant's:

    token          a  b  c  d  e           a pair learns the next feature, and through it the law of
    pair (f, tok)     f0,b f1,c f2,d       the token two places on; it counts if that token is the
    gives             f1'  f2'  f3'        assistant's: f1' for d and f2' for e
    law of            c    d    e

Later draft steps see the features that the head gave before (HASS, Zhang et al. 2024, 2408.15766):

    step 2            f1',c f2',d          gives f2'' f3'', laws of d and e

The loss is SmoothL1 between features plus the loss between token laws (Li et al. 2024, section
4.2).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.model.target import Target
from treespec.train.chunked import Guess, token_losses
from treespec.train.config import TrainConfig
from treespec.train.loss import Batch, Loss
from treespec.train.losses import chosen_loss
from treespec.train.teacher import counted, places_of, states_of, target_laws


def eagle_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """The sum over draft steps of decay^step times the loss, and the parts of each.

    The features that the head sees at step 1 carry noise. model: the head.
    """
    # 1. What the head gives from every position.
    extrapolated = model(batch.tokens, noisy(batch, config.noise), batch.steps)

    # 2. What the target has at the counted ones.
    # No position counts where answers are cut to their first token: the loss is 0 and still
    # depends on the head, so that this process takes part in the gradient's mean.
    counts = counted(batch.loss_mask)
    places = places_of(counts)
    wanted = states_of(batch.features, counts).to(target.dtype)
    logits: Callable[[Tensor], Tensor] = target.output_logits
    width = target.vocab_size
    if batch.law_tokens:
        logits, width = batch.law_tokens.logits(target, batch.generator), batch.law_tokens.width

    # 3. The loss between laws, of all steps together.
    given = [step[counts[:, number:]] for number, step in enumerate(extrapolated)]
    guesses = [
        Guess(states, lambda own: logits(own.to(target.dtype)), share=config.step_decay**step)
        for step, states in enumerate(given)
    ]
    laws = target_laws(wanted, logits, width)
    tokens = token_losses(guesses, laws, places, chosen_loss(config))

    # 4. The loss between features, of each step.
    total = config.token_weight * tokens.total
    parts: dict[str, Tensor] = {}
    for step, states in enumerate(given):
        feature = feature_loss(states, wanted[places >= step])
        total = total + config.step_decay**step * config.feature_weight * feature
        named = {
            "feature": feature,
            "token": tokens.losses[step],
            "agreement": tokens.agreements[step],
        }
        parts |= {name if not step else f"{name}_{step + 1}": x for name, x in named.items()}
    return Loss(total, parts)


def noisy(batch: Batch, noise: float) -> Tensor:
    """[B, T - 2, H] the target's features, with uniform noise of ± noise · 512 / length.

    The noise is drawn where the features lie.
    """
    features = batch.features[:, :-2].float()
    drawn = torch.rand(features.shape, generator=batch.generator, device=features.device)
    widths = (noise * 512 / batch.lengths).to(features.device)
    return features + (drawn * 2 - 1) * widths[:, None, None]


def feature_loss(states: Tensor, wanted: Tensor) -> Tensor:
    """SmoothL1 between features [M, H], the mean; 0 where M is 0."""
    count = max(states.numel(), 1)
    return F.smooth_l1_loss(states.float(), wanted.float(), reduction="sum") / count
