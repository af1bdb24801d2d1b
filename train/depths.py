"""The losses of Medusa's and Hydra's heads, one head for each depth.

Five tokens, of which d and e are the assistant's.
The state at position t drafts tokens t + 2, t + 3, …:

    token              a  b  c  d  e
    state              h0 h1 h2
    head 0 drafts      c  d  e              d and e count
    head 1 drafts      d  e                 d and e count
"""

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn

from treespec.heads.depths import DepthHeads
from treespec.target import Target
from treespec.train.config import TrainConfig
from treespec.train.loss import Batch, Loss


def medusa_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """`medusa_loss` of a batch. model: the heads."""
    heads: DepthHeads = extract_model_from_parallel(model)
    counts = counted_heads(batch.loss_mask, heads.max_depth)  # [K, B, T - 2]
    kept, length = counts.any(0), counts.shape[2]
    tokens = torch.stack([ahead(batch.tokens, 2 + i, length)[kept] for i in range(len(counts))])
    logits = model(batch.features[:, :-2][kept].float())
    return medusa_loss(logits, tokens, counts[:, kept], config.depth_decay)


def hydra_objective(config: TrainConfig, target: Target, model: nn.Module, batch: Batch) -> Loss:
    """`hydra_loss` of a batch. model: the heads."""
    heads: DepthHeads = extract_model_from_parallel(model)
    counts = counted_heads(batch.loss_mask, heads.max_depth)  # [K, B, T - 2]
    kept, length = counts.any(0), counts.shape[2]
    following = target.embeddings(ahead(batch.tokens, 1, length + len(counts) - 1)).float()
    logits = model(batch.features[:, :-2].float(), following, kept)
    laws = [
        target.output_logits(ahead(batch.features, 1 + i, length)[kept]) for i in range(len(counts))
    ]
    return hydra_loss(logits, laws, counts[:, kept])


def ahead(x: Tensor, i: int, length: int) -> Tensor:
    """[B, T, ...] -> [B, length, ...] from position i on, padded with zeros."""
    part = x[:, i : i + length]
    return F.pad(part, (0, 0) * (x.dim() - 2) + (0, length - part.shape[1]))


def counted_heads(loss_mask: Tensor, heads: int) -> Tensor:
    """[B, T] bool, true at the assistant's tokens -> [K, B, T - 2]: states that count for head k."""
    length = loss_mask.shape[1] - 2
    return torch.stack([ahead(loss_mask, 2 + i, length) for i in range(heads)])


def medusa_loss(logits: list[Tensor], tokens: Tensor, counts: Tensor, decay: float) -> Loss:
    """Sum over heads of decay^i times cross-entropy with the text (Cai et al. 2024, section 2.2.1).

    logits: [M, V] for each of K heads. tokens, counts: [K, M] the token to draft, and whether it
    counts.
    """
    losses, agreements = [], []
    for head_logits, wanted, counting in zip(logits, tokens, counts, strict=True):
        losses.append(
            mean(F.cross_entropy(head_logits.float(), wanted, reduction="none"), counting)
        )
        agreements.append(mean((head_logits.argmax(-1) == wanted).float(), counting))
    total = torch.stack([decay**i * loss for i, loss in enumerate(losses)]).sum()
    return Loss(total, {"token": losses[0], "agreement": agreements[0]})


def hydra_loss(logits: list[Tensor], laws: list[Tensor], counts: Tensor) -> Loss:
    """Sum over heads of cross-entropy with the target's law (Ankner et al. 2024, section 4.1).

    logits, laws: for each of K heads its logits and the target's, [M, V]. counts: [K, M], whether
    the token counts.
    """
    losses, agreements = [], []
    for head_logits, law, counting in zip(logits, laws, counts, strict=True):
        losses.append(
            mean(
                F.cross_entropy(head_logits.float(), law.float().softmax(-1), reduction="none"),
                counting,
            )
        )
        agreements.append(mean((head_logits.argmax(-1) == law.argmax(-1)).float(), counting))
    return Loss(torch.stack(losses).sum(), {"token": losses[0], "agreement": agreements[0]})


def mean(values: Tensor, counts: Tensor) -> Tensor:
    """Mean of the values [M] that count; 0 where none does."""
    return (values * counts).sum() / counts.sum().clamp(min=1)
