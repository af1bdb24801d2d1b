"""The losses between the target's law p and the head's law q, each with its gradient.

`--loss` takes their names. α = Σ min(p, q) is the probability that a single draft is accepted; for
several independent drafts α* is that of the best verifier (`treespec.verify.rates`). With q the
softmax of logits z, and H the tokens whose draft is sometimes refused:

    loss              value                       gradient at z_i
    cross-entropy     -Σ p log q                  q_i - p_i
    tv                1 - α                       q_i (q(not H) - [i not in H])      H: q > p
    log-acceptance    -log α                      that of tv, divided by α
    lk                λ KL + (1 - λ) (1 - α)      both, with λ = exp(-3 α) held fixed
    acceptance:K      1 - α* of K drafts          K q(H)^(K-1) q_i ([i in H] - q(H))

The last is the envelope theorem's: α* is the minimum over H of p(H) + 1 - q(H)^K, so only the best
H moves it. At K = 1 it is tv.

p may sum to less than 1, where a draft vocabulary leaves tokens out: they are never accepted.
Cross-entropy and KL are then those of p divided by its sum, as published.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor

from treespec.train.config import draws_of

ETA = 3.0  # of lk: Samarin et al. 2026 (2602.23881)
TINY = torch.finfo(torch.float32).tiny

# (p [M, N], log q [M, N]) -> values [M], and the gradient [M, N] of their sum at q's logits. It
# overwrites log q, so that a chunk needs no further array.
ValueAndSlope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@final
@dataclass(frozen=True)
class TokenLoss:
    """bytes: the most memory for each row and token of a chunk, laws and logits included."""

    of: ValueAndSlope
    bytes: int = 28


def cross_entropy(p: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """-Σ p log q, of p divided by its sum."""
    share = mass(p).reciprocal()
    values = -(p * logs).sum(-1) * share
    return values, logs.exp_().addcmul_(p, share[:, None].to(p.dtype), value=-1)


def refusal(p: Tensor, logs: Tensor, log: bool = False) -> tuple[Tensor, Tensor]:
    """1 - α, or -log α."""
    q = logs.exp_()
    accepted, under = overlap(p, q)
    slope = q.mul_(under.sum(-1, keepdim=True)).sub_(under)
    if not log:
        return 1 - accepted, slope
    accepted = accepted.clamp(min=TINY)
    return -accepted.log(), slope.div_(accepted[:, None])


def lk(p: Tensor, logs: Tensor) -> tuple[Tensor, Tensor]:
    """λ KL + (1 - λ) (1 - α), where λ = exp(-3 α) gives KL the weight while drafts are poor."""
    # 1. The divergence.
    share = mass(p).reciprocal()
    entropy = -torch.xlogy(p, p).sum(-1) * share - share.log()
    divergence = -(p * logs).sum(-1) * share - entropy

    # 2. The overlap, and the weights of both.
    q = logs.exp_()
    accepted, under = overlap(p, q)
    weight = (-ETA * accepted).exp()
    values = weight * divergence + (1 - weight) * (1 - accepted)

    # 3. λ (q - p) + (1 - λ) (q q(not H) - q [not H]).
    rest = (1 - weight)[:, None]
    factor = weight[:, None] + rest * under.sum(-1, keepdim=True)
    slope = q.mul_(factor).sub_(under.mul_(rest))
    return values, slope.addcmul_(p, (weight * share)[:, None], value=-1)


def refused(p: Tensor, logs: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """1 - α* of `draws` independent drafts."""
    # 1. The prefix of tokens in descending q/p with the smallest p(H) - q(H)^K.
    q = logs.exp_()
    order = (q / p.clamp(min=TINY)).argsort(-1, descending=True)
    cut = p.gather(1, order).cumsum(-1, dtype=torch.float64)
    cut -= q.gather(1, order).cumsum(-1, dtype=torch.float64).pow_(draws)
    best, last = cut.min(-1, keepdim=True)
    del cut
    length = torch.where(best < 0, last + 1, 0)

    # 2. Its mass under both laws, and the gradient.
    within = torch.arange(order.shape[1], device=order.device) < length
    inside = torch.empty_like(within).scatter_(1, order, within)
    del order, within
    likely = q.masked_fill(~inside, 0)
    held = likely.sum(-1, keepdim=True)
    values = held.squeeze(1) ** draws - p.masked_fill(~inside, 0).sum(-1)
    slope = likely.sub_(q.mul_(held)).mul_(draws * held ** (draws - 1))
    return values, slope


def overlap(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """α [M], and q where it is at most p, 0 elsewhere, [M, N]."""
    return torch.minimum(p, q).sum(-1), q.masked_fill(q > p, 0)


def mass(p: Tensor) -> Tensor:
    """[M] the sum of each law."""
    return p.sum(-1).clamp(min=TINY)


LOSSES = {  # by `--loss`, but for acceptance:K
    "cross-entropy": TokenLoss(cross_entropy),
    "tv": TokenLoss(refusal),
    "log-acceptance": TokenLoss(partial(refusal, log=True)),
    "lk": TokenLoss(lk),
}
LOSSES["published"] = LOSSES["cross-entropy"]


def chosen_loss(name: str) -> TokenLoss:
    """The loss that `--loss` names. "published" is cross-entropy at every kind of head."""
    draws = draws_of(name)
    return TokenLoss(partial(refused, draws=draws), bytes=56) if draws else LOSSES[name]
