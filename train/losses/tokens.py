"""The losses between the target's distribution p and the head's q, a chunk of positions at a time.

`--loss` takes their names. α = Σ min(p, q) is the probability that a single draft is accepted:

    loss              value
    cross-entropy     -Σ p log q
    tv                1 - α

p may sum to less than 1, where a draft vocabulary leaves tokens out: they are never accepted. Where
it sums to 0 a position has no loss.
Cross-entropy is then that of p divided by its sum, as published.

Logits of all counted positions would take most of a run's memory: at 49,152 tokens 200 kB a
position in float32, several times over and for each draft step. So the forward pass computes a
chunk's logits, its loss and the gradients, and keeps no more than those of hidden states and output
weights, which the backward pass scales:

    positions    0 1 2 3 | 4 5 6 7 | 8 9     one chunk after another
    target       probabilities of the chunk, once for all draft steps
    step 1       logits, loss, gradients     freed before step 2
    step 2       logits, loss, gradients
    keeps        [H] a position and step, and the output weights' gradients
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

TINY = torch.finfo(torch.float32).tiny
BUDGET = 6  # bytes for each counted position and token, at most
# Numbers in an array of a chunk. On a CPU 8 MB in float32, which the heap reuses and caches hold in
# part; elsewhere more, because large products are faster.
ON_CPU = 2 << 20
ELSEWHERE = 64 << 20

TokenLoss = Callable[[Tensor, Tensor], Tensor]  # (p [M, N], log q [M, N]) -> losses [M]


def cross_entropy(p: Tensor, logs: Tensor) -> Tensor:
    """-Σ p log q, of p divided by its sum."""
    return -(p * logs).sum(-1) / mass(p)


def refused(p: Tensor, logs: Tensor) -> Tensor:
    """1 - α."""
    return 1 - torch.minimum(p, logs.exp()).sum(-1)


def mass(p: Tensor) -> Tensor:
    """[M] the sum of each distribution."""
    return p.sum(-1).clamp(min=TINY)


LOSSES: dict[str, TokenLoss] = {  # by `--loss`
    "published": cross_entropy,
    "cross-entropy": cross_entropy,
    "tv": refused,
}


class Teacher(NamedTuple):
    """The target's distributions at the counted positions, computed a chunk at a time.

    width: the largest number of logits that a position needs, V. of: the probabilities [m, N] of a
    slice of the positions, in float32 or float64; a row may sum to less than 1.
    """

    width: int
    of: Callable[[slice], Tensor]


class Guess(NamedTuple):
    """What one draft step, or the head of one depth, gave.

    states: [M_i, H] its hidden states at the counted positions that it reaches. output: states
    [m, H] -> logits [m, N]. share: the factor of its loss in the total. weights: parameters of
    `output` that learn.
    """

    states: Tensor
    output: Callable[[Tensor], Tensor]
    share: float = 1.0
    weights: tuple[nn.Parameter, ...] = ()

    @classmethod
    def by_layers(
        cls, steps: Iterable[Tensor], layers: Iterable[nn.Module], decay: float
    ) -> list["Guess"]:
        """A guess for each step, by output layers of the head's own. Each has `decay` of the share
        of the one before.
        """
        return [
            cls(states, layer, decay**i, tuple(layer.parameters()))
            for i, (states, layer) in enumerate(zip(steps, layers, strict=False))
        ]


class Loss(NamedTuple):
    """total: what a step lowers. parts: what a run reports next to it, without a gradient.

    All are means over the counted positions.
    """

    total: Tensor
    parts: dict[str, Tensor]


def token_losses(
    guesses: Sequence[Guess], teacher: Teacher, places: Tensor, loss: str, rows: int | None = None
) -> Loss:
    """The losses of draft steps against the target, each the mean over its positions.

    Returns the sum of the guesses' losses times their shares. Its parts are for guess 1, 2, … the
    loss, `token_1`, and the share of positions with the target's most likely token, `agreement_1`.

    places: [M] int64; guess i, from 0, reaches the positions whose place is i or more, in order.
    loss: as `--loss`. rows: positions per chunk. Default: as many as keep the memory in `BUDGET`.
    """
    # 1. Zeros to add to, and how far each guess is.
    device = places.device
    loss_of = LOSSES[loss]
    size = 28 if loss_of is cross_entropy else 36  # bytes for each row and token of a chunk
    elements = ON_CPU if device.type == "cpu" else ELSEWHERE
    rows = rows or max(1, min(elements // teacher.width, BUDGET * len(places) // size))
    slopes = [torch.zeros_like(guess.states) for guess in guesses]
    known = {weight: torch.zeros_like(weight) for guess in guesses for weight in guess.weights}
    losses, agreeing = torch.zeros(2, len(guesses), device=device)
    done = [0] * len(guesses)

    for start in range(0, len(places), rows):
        # 2. The target's probabilities of a chunk, in its own precision, once for all guesses.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            target = teacher.of(slice(start, start + rows))
            # max is faster than argmax
            best = target.max(-1).indices
            sums = target.sum(-1)
        for i, guess in enumerate(guesses):
            reached = places[start : start + rows] >= i
            here = slice(done[i], done[i] + int(reached.sum()))
            done[i] = here.stop
            if here.start == here.stop:
                continue
            p = target if here.stop - here.start == len(target) else target[reached]
            learns = sums[reached] > 0
            likely = best[reached]

            # 3. A guess's loss in the chunk, and its gradients. They are those of the sum: divided
            #    by the number of positions, much of them would be too small for float16.
            states = guess.states[here].detach().requires_grad_()
            logs = precise(guess.output(states)).log_softmax(-1)
            values = loss_of(p, logs).where(learns, 0).sum()
            gradients = torch.autograd.grad(values, (states, *guess.weights))
            losses[i] += values.detach()
            agreeing[i] += (learns & (logs.max(-1).indices == likely)).sum()
            share = guess.share / len(guess.states)
            slopes[i][here] = gradients[0] * share
            for weight, gradient in zip(guess.weights, gradients[1:], strict=True):
                known[weight].add_(gradient, alpha=share)
            del logs, values, gradients, p

    # 4. Means.
    counts = torch.tensor([max(count, 1) for count in done], device=device)
    parts: dict[str, Tensor] = {}
    for step, (value, share) in enumerate(zip(losses / counts, agreeing / counts, strict=True), 1):
        parts |= {f"token_{step}": value, f"agreement_{step}": share}
    shares = torch.tensor([guess.share for guess in guesses], device=device)
    learnt = [*(guess.states for guess in guesses), *known]
    total = torch.dot(losses / counts, shares)
    return Loss(Scaled.apply(total, [*slopes, *known.values()], *learnt), parts)


@final
class Scaled(torch.autograd.Function):
    """A total whose gradients at `tensors` are known already: the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        # In place, and handed over: gradients of weights are as large as the weights.
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError("the gradients of a chunked loss can be taken once")
        return None, None, *(gradient.mul_(slope) for gradient in gradients)


def precise(x: Tensor) -> Tensor:
    """In float32, or float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()
