"""Functions that several schemes use: drawing from a distribution, acceptance, residuals.

A distribution is a tensor [B, V] of masses, which need not sum to 1: a plan normalises it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.sampling.probs import sample_each, select_topk
from treespec.trees.tree import Draws
from treespec.verify.scheme import Scheme


def keep_first(tokens: Tensor, number: Tensor) -> Tensor:
    """Return the draws [B, K] with -1 beyond the first `number` [B, 1]."""
    return tokens.masked_fill(torch.arange(tokens.shape[1], device=tokens.device) >= number, -1)


def draw_iid_children(q: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """Draw [B, width] independent tokens from q [B, V]; tokens may repeat. A row of NaN or without mass gives -1."""
    tokens = sample_each(q, width, generator)
    return tokens.masked_fill_(tokens >= q.shape[-1], -1)


class Independent(Scheme):
    """A scheme of independent draws."""

    drawing = "with replacement"
    random_draws = "independent"

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        return Draws(keep_first(draw_iid_children(q, width, generator), number))


def select_most_likely(scores: Tensor, k: int) -> Tensor:
    """Return [B, k] the tokens of the k largest scores [B, V], largest first; -1 beyond V tokens."""
    best = select_topk(scores, min(k, scores.shape[-1]))[1]
    return pad(best, (0, k - best.shape[-1]), value=-1)


def select_top_tokens(q: Tensor, number: Tensor, width: int) -> Tensor:
    """Return [B, width] the `number` [B, 1] most likely tokens of q; -1 beyond them, and for tokens with q 0."""
    best = keep_first(select_most_likely(q, width), number)
    return best.masked_fill(q.gather(1, best.clamp(min=0)) == 0, -1)


def drop_repeats(tokens: Tensor) -> Tensor:
    """Return the draws [B, K] in their order without repeats; -1 fills the row."""
    repeat = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1) | (tokens < 0)
    return tokens.masked_fill(repeat, -1).gather(1, repeat.int().argsort(dim=-1, stable=True))


def mask_out(masses: Tensor, tokens: Tensor) -> Tensor:
    """Return the masses [B, V] with 0 on the tokens [B, K]; -1 stands for no token."""
    return masses.scatter_reduce(1, tokens.clamp(min=0), (tokens < 0).to(masses.dtype), "prod")


def sum_mass_on(masses: Tensor, tokens: Tensor) -> Tensor:
    """Sum the masses [B, V] on the distinct tokens [B, K]. Returns [B]."""
    return (masses - mask_out(masses, tokens)).sum(-1)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """Return [B] the sum of min(p, q): the acceptance rate of a single draft."""
    return torch.minimum(p, q).sum(-1)


def clamp_positive(x: Tensor) -> Tensor:
    """Return x as a divisor: at least the smallest number with a finite reciprocal."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def divide_probabilities(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p/q), with 0/0 = 0."""
    return (p / clamp_positive(q)).clamp(max=1)


def scale(q: Tensor, present: Tensor) -> Tensor:
    """Return [B, 1] the factor that normalises q [B, V]; 0 for rows that are not `present` [B, 1]."""
    return present / clamp_positive(q.sum(-1, keepdim=True))


def subtract(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
    """Return [B, V] (p - weight q)+. weight: [B, 1]."""
    return torch.addcmul(p, q, weight, value=-1).clamp_(min=0)


def normalize_residual(residual: Tensor, p: Tensor, total: Tensor | float = 1.0) -> Tensor:
    """Scale the residual [B, V] to sum to `total` [B, 1]. Overwrites it.

    A row without mass becomes p; only rounding causes that. A subnormal mass counts as
    none, because its reciprocal is infinite.
    """
    mass = residual.sum(-1, keepdim=True)
    empty = (mass < torch.finfo(p.dtype).tiny).to(p.dtype)
    return residual.addcmul_(p, empty).mul_(total / (mass + empty))


def plan_from_acceptance(p: Tensor, residual: Tensor, tokens: Tensor, accepted: Tensor) -> Tensor:
    """Return [B, V] the plan of draws that are accepted with known probabilities.

    Args:
        p: [B, V] the target's distribution.
        residual: [B, V] sampled for the output with the remaining probability. It is overwritten.
        tokens: [B, K] the draws.
        accepted: [B, K] Pr(each draw is output).
    """
    refused = (1 - accepted.sum(-1, keepdim=True)).clamp(min=0)
    return normalize_residual(residual, p, refused).scatter_add_(1, tokens.clamp(min=0), accepted)


def accept_one_draft(p: Tensor, q: Tensor, tokens: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Accept one draw y of distribution q with min(1, p/q).

    Args:
        p, q: [B, V].
        tokens: [B, K]; y is one of them.
        chosen: [B, K] Pr(y is that token).

    Returns: [B, K] Pr(each token is accepted), and the residual (p - q)+ [B, V]; p for a row without a draw.
    """
    token_index = tokens.clamp(min=0)
    weight = scale(q, chosen.any(-1, keepdim=True))
    accepted = (
        divide_probabilities(p.gather(1, token_index), q.gather(1, token_index) * weight) * chosen
    )
    return accepted, subtract(p, q, weight)


def plan_single_draft(p: Tensor, q: Tensor, tokens: Tensor, chosen: Tensor | None = None) -> Tensor:
    """Return [B, V] the plan for one draw: if `accept_one_draft` refuses it, the output comes from norm (p - q)+.

    Args:
        p, q, tokens: as for `accept_one_draft`.
        chosen: as for `accept_one_draft`. Default: 1, for K = 1.
    """
    if chosen is None:
        chosen = tokens >= 0
    accepted, residual = accept_one_draft(p, q, tokens, chosen)
    return plan_from_acceptance(p, residual, tokens, accepted)


def plan_recursive_rejection(p: Tensor, qs: Iterable[Tensor], tokens: Tensor) -> Tensor:
    """Return [B, V] the plan that verifies draws in turn, each against the residual of the earlier draws.

    qs: K distributions [B, V], each that of a draw given the draws before it. tokens: [B, K].
    """
    accepted, residual = reject_recursively(p, qs, tokens)
    return plan_from_acceptance(p, residual, tokens, accepted)


def reject_recursively(p: Tensor, qs: Iterable[Tensor], tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return [B, K] Pr(each draw is accepted) by recursive rejection, and the last residual [B, V].

    The residual is not normalised. Arguments as for `plan_recursive_rejection`.
    """
    residual = p
    residual_mass = torch.ones_like(p[:, :1])
    all_refused = residual_mass  # [B, 1] Pr(all draws so far are refused)
    accepted = []
    for token, q in zip(tokens.split(1, dim=1), qs, strict=True):
        present = token >= 0
        token_index = token.clamp(min=0)
        weight = scale(q, present) * residual_mass
        accept = (
            divide_probabilities(residual.gather(1, token_index), q.gather(1, token_index) * weight)
            * present
        )
        accepted.append(all_refused * accept)
        all_refused = all_refused * (1 - accept)
        residual = subtract(residual, q, weight)
        residual_mass = residual.sum(-1, keepdim=True)
    return torch.cat(accepted, dim=1), residual
