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

from treespec.heads.depths import DepthHeads
from treespec.model.target import Target
from treespec.train.chunked import Guess, Laws, token_losses
from treespec.train.config import TrainConfig
from treespec.train.loss import Batch, Loss
from treespec.train.losses import chosen_loss
from treespec.train.teacher import counted, places_of, states_of, target_laws, text_laws


def medusa_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """Sum over heads of decay^i times the mean loss. model: the heads."""
    counts = counted(batch.loss_mask)
    if config.loss == "published":
        laws = text_laws(batch.tokens[:, 2:][counts], target.vocab_size)
    else:
        laws = last_laws(target, batch, counts)
    reached = counted_heads(batch.loss_mask, heads_of(model).max_depth)
    states = model(batch.features[:, :-2].float(), reached)
    return depth_loss(config, model, states, laws, counts, config.depth_decay)


def hydra_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """Sum over heads of the mean loss. model: the heads."""
    counts = counted(batch.loss_mask)
    reached = counted_heads(batch.loss_mask, heads_of(model).max_depth)
    length = counts.shape[1] + len(reached) - 1
    following = target.embeddings(ahead(batch.tokens, 1, length)).float()
    states = model(batch.features[:, :-2].float(), following, reached)
    return depth_loss(config, model, states, last_laws(target, batch, counts), counts)


def depth_loss(
    config: TrainConfig,
    model: nn.Module,
    states: list[Tensor],
    laws: Laws,
    counts: Tensor,
    decay: float = 1.0,
) -> Loss:
    """The loss of all heads, and the parts of the first.

    states: for each head [M_i, H] before its output layer. laws: at the counted positions
    [B, T - 2].
    """
    layers = heads_of(model).output_layers
    guesses = [
        Guess.by_layer(given, layer, decay**i)
        for i, (given, layer) in enumerate(zip(states, layers, strict=True))
    ]
    found = token_losses(guesses, laws, places_of(counts), chosen_loss(config))
    return Loss(found.total, {"token": found.losses[0], "agreement": found.agreements[0]})


def heads_of(model: nn.Module) -> DepthHeads:
    """The heads, without what several processes wrap around them."""
    heads: DepthHeads = extract_model_from_parallel(model)
    return heads


def last_laws(target: Target, batch: Batch, counts: Tensor) -> Laws:
    """The target's laws at the counted positions."""
    states = states_of(batch.features, counts)
    return target_laws(states, target.output_logits, target.vocab_size)


def ahead(x: Tensor, i: int, length: int) -> Tensor:
    """[B, T, ...] -> [B, length, ...] from position i on, padded with zeros."""
    part = x[:, i : i + length]
    return F.pad(part, (0, 0) * (x.dim() - 2) + (0, length - part.shape[1]))


def counted_heads(loss_mask: Tensor, heads: int) -> Tensor:
    """[B, T] bool, true at the assistant's tokens -> [K, B, T - 2]: which states head k counts."""
    length = loss_mask.shape[1] - 2
    return torch.stack([ahead(loss_mask, 2 + i, length) for i in range(heads)])
