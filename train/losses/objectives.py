"""The loss of each kind of head over a batch: the draft steps of EAGLE's, the heads of Medusa's and Hydra's.

Five tokens, of which d and e are the assistant's. EAGLE's heads draft from every pair at once; a
pair counts if the token that it learns the law of is the assistant's:

    token          a  b  c  d  e
    pair (f, tok)     f0,b f1,c f2,d       learns the next feature, and the law of the token two on
    gives             f1'  f2'  f3'        f1' for d and f2' for e
    law of            c    d    e

Later draft steps see the features that the head gave before (HASS, Zhang et al. 2024, 2408.15766;
training-time test, Li et al. 2025, 2503.01840, section 3.2):

    step 2            f1',c f2',d          gives f2'' f3'', laws of d and e

EAGLE-1's loss is SmoothL1 between features plus the loss between token laws (Li et al. 2024,
2401.15077, section 4.2). EAGLE-3's is the latter alone, where the target's most likely token is one
that the head drafts.

Of Medusa and Hydra, the state at position t drafts tokens t + 2, t + 3, …:

    state              h0 h1 h2
    head 0 drafts      c  d  e              d and e count
    head 1 drafts      d  e                 d and e count

Medusa learns the text's tokens (Cai et al. 2024, section 2.2.1), Hydra the target's laws (Ankner
et al. 2024, section 4.1); with another `--loss` than the published one, so does Medusa.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.medusa import DepthHeads
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.losses.chunked import Guess, token_losses
from treespec.train.losses.teacher import (
    Batch,
    Loss,
    counted,
    drafted_laws,
    places_of,
    states_of,
    target_laws,
    text_laws,
)
from treespec.train.losses.tokens import chosen_loss


def eagle_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """The sum over draft steps of decay^step times the loss, and the parts of each.

    The features that the head sees at step 1 carry noise. model: the head.
    """
    # 1. What the head gives from every position, and what the target has at the counted ones.
    # No position counts where answers are cut to their first token: the loss is 0 and still
    # depends on the head, so that this process takes part in the gradient's mean.
    counts = counted(batch.loss_mask)
    steps = model(batch.tokens, noisy(batch, config.noise), counts, batch.steps)
    places = places_of(counts)
    wanted = states_of(batch.features, counts).to(target.dtype)
    width = target.vocab_size
    logits: Callable[[Tensor], Tensor] = target.output_logits
    if batch.law_tokens:
        logits, width = batch.law_tokens.logits(target, batch.generator), batch.law_tokens.width

    # 2. The loss between laws, of all steps together.
    guesses = [
        Guess(states, lambda own: logits(own.to(target.dtype)), share=config.step_decay**step)
        for step, states in enumerate(steps)
    ]
    tokens = token_losses(
        guesses, target_laws(wanted, logits, width), places, chosen_loss(config.loss)
    )

    # 3. The loss between features, of each step.
    total = config.token_weight * tokens.total
    parts: dict[str, Tensor] = {}
    for step, states in enumerate(steps):
        pair = states.float(), wanted[places >= step].float()
        feature = F.smooth_l1_loss(*pair, reduction="sum") / max(states.numel(), 1)
        total = total + config.step_decay**step * config.feature_weight * feature
        end = f"_{step + 1}" if step else ""
        parts[f"feature{end}"] = feature
        parts[f"token{end}"] = tokens.losses[step]
        parts[f"agreement{end}"] = tokens.agreements[step]
    return Loss(total, parts)


def eagle3_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """The sum over draft steps of decay^step times the mean loss, and the parts of each.

    model: the head.
    """
    # 1. The target's laws, where its most likely token is one that the head drafts.
    head: Eagle3Head = extract_model_from_parallel(model)
    tapped, last = target.parted(batch.features, head.taps)
    counts = counted(batch.loss_mask)
    states = states_of(last, counts)
    if head.vocabulary is None:
        laws = target_laws(states, target.output_logits, target.vocab_size)
    else:
        drafted, laws = drafted_laws(target, states, head.vocabulary)
        counts = counts.masked_scatter(counts, drafted)

    # 2. The head's, and their losses.
    steps = model(batch.tokens, tapped[:, :-2].float(), counts, batch.steps)
    guesses = [
        Guess.by_layer(states, head.lm_head, config.step_decay**step)
        for step, states in enumerate(steps)
    ]
    found = token_losses(guesses, laws, places_of(counts), chosen_loss(config.loss))
    parts = {f"token_{step}": loss for step, loss in enumerate(found.losses, start=1)}
    parts |= {f"agreement_{step}": share for step, share in enumerate(found.agreements, start=1)}
    return Loss(found.total, parts)


def noisy(batch: Batch, noise: float) -> Tensor:
    """[B, T - 2, H] the target's features, with uniform noise of ± noise · 512 / length.

    The noise is drawn where the features lie.
    """
    features = batch.features[:, :-2].float()
    drawn = torch.rand(features.shape, generator=batch.generator, device=features.device)
    widths = (noise * 512 / batch.lengths).to(features.device)
    return features + (drawn * 2 - 1) * widths[:, None, None]


def depth_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """Sum over heads of decay^i times the mean loss, and the parts of the first. Hydra's decay is 1.

    model: the heads.
    """
    # 1. What each head gives before its output layer, [M_i, H]. Hydra's see the tokens that follow.
    heads: DepthHeads = extract_model_from_parallel(model)
    counts, medusa = counted(batch.loss_mask), heads.kind == "medusa"
    length = counts.shape[1]
    reached = torch.stack([ahead(counts, i, length) for i in range(heads.max_depth)])  # [K, B, R]
    following = () if medusa else (ahead(batch.tokens[:, 1:], 0, length + len(reached) - 1),)
    embedded = [target.embeddings(tokens).float() for tokens in following]
    states = model(batch.features[:, :-2].float(), *embedded, reached)

    # 2. What they learn, and their losses.
    if medusa and config.loss == "published":
        laws = text_laws(batch.tokens[:, 2:][counts], target.vocab_size)
    else:
        last = states_of(batch.features, counts)
        laws = target_laws(last, target.output_logits, target.vocab_size)
    decay = config.depth_decay if medusa else 1.0
    guesses = [
        Guess.by_layer(own, layer, decay**i)
        for i, (own, layer) in enumerate(zip(states, heads.output_layers, strict=True))
    ]
    found = token_losses(guesses, laws, places_of(counts), chosen_loss(config.loss))
    return Loss(found.total, {"token": found.losses[0], "agreement": found.agreements[0]})


def ahead(x: Tensor, i: int, length: int) -> Tensor:
    """[B, T] -> [B, length] from position i on, padded with zeros."""
    part = x[:, i : i + length]
    return F.pad(part, (0, length - part.shape[1]))
