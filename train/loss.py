"""What is minimised, by kind of head. EAGLE-1: the features that follow, and the token laws that they lead to.

Five tokens, of which d and e are the assistant's:

    token          a  b  c  d  e           a pair learns the feature under it, and through it the law of
    pair (f, tok)     f0,b f1,c f2,d       the token two places on; it counts if that token is the
    gives             f1'  f2'  f3'        assistant's: f1' for d and f2' for e
    law of            c    d    e
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor

from treespec.target import Target
from treespec.train.config import TrainConfig
from treespec.train.depths import ahead, counted_heads, hydra_loss, medusa_loss
from treespec.train.unrolled import drafted_laws, unrolled_loss


class Batch(NamedTuple):
    """tokens: [B, T] int64, padded. loss_mask: [B, T] bool, the assistant's. features: [B, T, F]. lengths: [B].

    generator: of this batch's noise.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor
    lengths: Tensor
    generator: torch.Generator


class Loss(NamedTuple):
    """What is minimised, and what is reported beside it. All means over the counted positions."""

    total: Tensor
    parts: dict[str, Tensor]


def eagle_objective(config: TrainConfig, target: Target, model: Any, batch: Batch) -> Loss:
    """`eagle_loss` of a batch, with noise on the features that the head sees. model: the head."""
    noise = torch.rand(batch.features[:, :-2].shape, generator=batch.generator) * 2 - 1
    noise = noise * (config.noise * 512 / batch.lengths)[:, None, None]
    given = batch.features[:, :-2].float() + noise.to(batch.features.device)
    extrapolated = model(batch.tokens[:, 1:-1], given, torch.arange(given.shape[1], device=given.device))
    counts = counted(batch.loss_mask)
    if not counts.any():  # answers cut to their first token: nothing to learn, but every process takes part
        counts = torch.ones_like(counts)
    return eagle_loss(
        extrapolated[counts],
        batch.features[:, 1:-1][counts],
        target.output_logits,
        config.feature_weight,
        config.token_weight,
    )


def eagle3_objective(config: TrainConfig, target: Target, model: Any, batch: Batch) -> Loss:
    """`unrolled_loss` of a batch, where the target's likeliest token is one that the head drafts. model: the head."""
    head = extract_model_from_parallel(model)
    given, last = target.parted(batch.features, head.taps)
    counts = counted(batch.loss_mask)
    laws, drafted = drafted_laws(target.output_logits(last[:, 1:-1][counts]), head.vocabulary)
    counts = counts.masked_scatter(counts, drafted)
    logits = model(batch.tokens, given[:, :-2].float(), counts, config.unrolled_steps)
    return Loss(*unrolled_loss(logits, laws[drafted], counts.nonzero()[:, 1], config.step_decay))


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
    """SmoothL1 between features, plus cross-entropy against the target's softmax (Li et al. 2024, section 4.2).

    extrapolated: [M, H] what the head gave at the counted positions. features: [M, H] what the target has there.
    output_logits: [M, H] -> [M, V] logits, the target's own output path.
    """
    wanted = output_logits(features).float()
    given = output_logits(extrapolated.to(features.dtype)).float()
    feature = F.smooth_l1_loss(extrapolated.float(), features.float())
    token = F.cross_entropy(given, wanted.softmax(-1))
    agreement = (given.argmax(-1) == wanted.argmax(-1)).float().mean()
    parts = {"feature": feature, "token": token, "agreement": agreement}
    return Loss(feature_weight * feature + token_weight * token, parts)


def medusa_objective(config: TrainConfig, target: Target, model: Any, batch: Batch) -> Loss:
    """`medusa_loss` of a batch. model: the heads."""
    counts = counted_heads(batch.loss_mask, extract_model_from_parallel(model).max_depth)  # [K, B, T - 2]
    kept, length = counts.any(0), counts.shape[2]
    tokens = torch.stack([ahead(batch.tokens, 2 + i, length)[kept] for i in range(len(counts))])
    logits = model(batch.features[:, :-2][kept].float())
    return Loss(*medusa_loss(logits, tokens, counts[:, kept], config.depth_decay))


def hydra_objective(config: TrainConfig, target: Target, model: Any, batch: Batch) -> Loss:
    """`hydra_loss` of a batch. model: the heads."""
    counts = counted_heads(batch.loss_mask, extract_model_from_parallel(model).max_depth)  # [K, B, T - 2]
    kept, length = counts.any(0), counts.shape[2]
    following = target.embeddings(ahead(batch.tokens, 1, length + len(counts) - 1)).float()
    logits = model(batch.features[:, :-2].float(), following, kept)
    laws = [target.output_logits(ahead(batch.features, 1 + i, length)[kept]) for i in range(len(counts))]
    return Loss(*hydra_loss(logits, laws, counts[:, kept]))


OBJECTIVES = {  # by kind of head: (config, target, model, batch) -> Loss
    "eagle": eagle_objective,
    "eagle3": eagle3_objective,
    "medusa": medusa_objective,
    "hydra": hydra_objective,
    "hydra++": hydra_objective,
}
