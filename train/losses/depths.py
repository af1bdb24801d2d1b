"""The losses of Medusa's and Hydra's heads, one head for each depth.

Five tokens, of which d and e are the assistant's.
The state at position t drafts tokens t + 2, t + 3, …:

    token              a  b  c  d  e
    state              h0 h1 h2
    head 0 drafts      c  d  e              d and e count
    head 1 drafts      d  e                 d and e count

Medusa learns the text's tokens (Cai et al. 2024, section 2.2.1), Hydra the target's laws (Ankner
et al. 2024, section 4.1); with another `--loss` than the published one, so does Medusa.
"""

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from treespec.heads.medusa import DepthHeads
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.losses.chunked import Guess, token_losses
from treespec.train.losses.teacher import (
    Batch,
    Loss,
    counted,
    places_of,
    states_of,
    target_laws,
    text_laws,
)
from treespec.train.losses.tokens import chosen_loss


def medusa_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """Sum over heads of decay^i times the mean loss. model: the heads."""
    reached = counted_heads(batch.loss_mask, heads_of(model).max_depth)
    states = model(batch.features[:, :-2].float(), reached)
    return depth_loss(config, target, batch, heads_of(model), states)


def hydra_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """Sum over heads of the mean loss. model: the heads."""
    reached = counted_heads(batch.loss_mask, heads_of(model).max_depth)
    length = reached.shape[-1] + len(reached) - 1
    following = target.embeddings(ahead(batch.tokens, 1, length)).float()
    states = model(batch.features[:, :-2].float(), following, reached)
    return depth_loss(config, target, batch, heads_of(model), states)


def depth_loss(
    config: TrainConfig, target: Target, batch: Batch, heads: DepthHeads, states: list[Tensor]
) -> Loss:
    """The loss of all heads, and the parts of the first.

    states: for each head [M_i, H] before its output layer.
    """
    counts, medusa = counted(batch.loss_mask), heads.kind == "medusa"
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


def heads_of(model: nn.Module) -> DepthHeads:
    """The heads, without what several processes wrap around them."""
    heads: DepthHeads = extract_model_from_parallel(model)
    return heads


def ahead(x: Tensor, i: int, length: int) -> Tensor:
    """[B, T, ...] -> [B, length, ...] from position i on, padded with zeros."""
    part = x[:, i : i + length]
    return F.pad(part, (0, 0) * (x.dim() - 2) + (0, length - part.shape[1]))


def counted_heads(loss_mask: Tensor, heads: int) -> Tensor:
    """[B, T] bool, true at the assistant's tokens -> [K, B, T - 2]: which states head k counts."""
    length = loss_mask.shape[1] - 2
    return torch.stack([ahead(loss_mask, 2 + i, length) for i in range(heads)])
