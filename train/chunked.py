"""The loss of draft laws over a whole vocabulary, a chunk of positions at a time.

Logits of all counted positions would take most of a run's memory: at 49,152 tokens 200 kB a
position in float32, several times over and for each draft step. So the forward pass computes a
chunk's laws, its loss and the gradient at its logits, which is known in closed form
(`train.losses`), and keeps no more than the gradients of hidden states and output weights. The
backward pass only scales them:

    positions    0 1 2 3 | 4 5 6 7 | 8 9     one chunk after another
    target       laws of the chunk, once for all draft steps
    step 1       logits, loss, gradient      freed before step 2
    step 2       logits, loss, gradient
    keeps        [H] a position and step, and the output weights' gradients
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from treespec.train.losses import TokenLoss

BUDGET = 6  # bytes for each counted position and token, at most
# Numbers in an array of a chunk. On a CPU 25 MB in float32, which the heap reuses; elsewhere more,
# because large products are faster.
ON_CPU, ELSEWHERE = 6 << 20, 64 << 20


@final
@dataclass(frozen=True)
class Laws:
    """The target's laws at M counted positions, computed a chunk at a time.

    count: M. width: the largest number of logits that a position needs, V. of: the laws
    [m, N] of a slice of the positions, in float32 or float64; a row may sum to less than 1.
    """

    count: int
    width: int
    of: Callable[[slice], Tensor]


@final
@dataclass(frozen=True)
class Guess:
    """What one draft step, or the head of one depth, gave.

    states: [M_i, H] its hidden states at the counted positions that it reaches. output: states
    [m, H] -> logits [m, N]. weights: parameters of `output` that learn. share: the factor of its
    loss in the total.
    """

    states: Tensor
    output: Callable[[Tensor], Tensor]
    weights: tuple[nn.Parameter, ...] = ()
    share: float = 1.0

    @classmethod
    def by_layer(cls, states: Tensor, layer: nn.Module, share: float = 1.0) -> "Guess":
        """A guess whose output layer is the head's own."""
        weights = tuple(weight for weight in layer.parameters() if weight.requires_grad)
        return cls(states, layer, weights, share)


class TokenLosses(NamedTuple):
    """total: the sum of the guesses' losses times their shares, which alone has a gradient.

    losses, agreements: [S] for each guess the mean loss, and the share of its positions whose
    likeliest token is the target's.
    """

    total: Tensor
    losses: Tensor
    agreements: Tensor


def token_losses(
    guesses: Sequence[Guess],
    laws: Laws,
    places: Tensor,
    loss: TokenLoss,
    rows: int | None = None,
) -> TokenLosses:
    """The losses of draft steps against the target's laws, each the mean over its positions.

    places: [M] int64; guess i, from 0, reaches the positions whose place is i or more, in order.
    rows: positions per chunk. Default: as many as keep the memory within `BUDGET`.
    """
    rows = rows or chunk_rows(laws.count, laws.width, places.device, loss.bytes)
    weights = list({id(weight): weight for guess in guesses for weight in guess.weights}.values())
    states = [guess.states for guess in guesses]
    needs = torch.is_grad_enabled() and any(x.requires_grad for x in (*states, *weights))
    job = Job(tuple(guesses), laws, places, loss, rows, weights, needs)
    return TokenLosses(*ChunkedLoss.apply(job, *states, *weights))


def chunk_rows(count: int, width: int, device: torch.device, size: int = 28) -> int:
    """Rows of a chunk of `count` rows of `width` numbers, which take `size` bytes each."""
    elements = ON_CPU if device.type == "cpu" else ELSEWHERE
    return max(1, min(elements // width, BUDGET * count // size))


@final
@dataclass(frozen=True)
class Job:
    """What `token_losses` computes. weights: of all guesses. gradient: whether one is wanted."""

    guesses: Sequence[Guess]
    laws: Laws
    places: Tensor
    loss: TokenLoss
    rows: int
    weights: list[nn.Parameter]
    gradient: bool


@final
class ChunkedLoss(torch.autograd.Function):
    """`token_losses`, whose forward pass leaves the gradients for the backward pass to scale."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # 1. Zeros to add to, and the positions that each guess reaches, by chunk.
        guesses, device = job.guesses, job.places.device
        losses = torch.zeros(len(guesses), device=device)
        agreeing = torch.zeros(len(guesses), device=device)
        gradients = [torch.zeros_like(tensor) for tensor in tensors] if job.gradient else []
        of_weight = {}
        if job.gradient:
            of_weight = dict(zip(map(id, job.weights), gradients[len(guesses) :], strict=True))
        starts = torch.arange(0, job.laws.count + job.rows, job.rows, device=device)
        reached = [(job.places >= i).nonzero().squeeze(1) for i in range(len(guesses))]
        before = [torch.searchsorted(positions, starts).tolist() for positions in reached]

        for number, start in enumerate(range(0, job.laws.count, job.rows)):
            # 2. The target's laws of a chunk, in its own precision, once for all guesses.
            with torch.autocast(device.type, enabled=False):
                laws = job.laws.of(slice(start, start + job.rows))
            for i, guess in enumerate(guesses):
                # 3. A guess's part of them, its loss and its gradients.
                first, end = before[i][number : number + 2]
                if first == end:
                    continue
                whole = end - first == len(laws)
                law = laws if whole else laws[reached[i][first:end] - start]
                part = compare(guess, guess.states[first:end], law, job)
                losses[i] += part.loss
                agreeing[i] += part.agreeing
                if job.gradient:
                    share = guess.share / len(guess.states)
                    gradients[i][first:end] = part.states * share
                    for weight, slope in zip(guess.weights, part.weights, strict=True):
                        of_weight[id(weight)].add_(slope, alpha=share)

        # 4. Means.
        ctx.gradients = gradients
        counts = torch.tensor([max(len(guess.states), 1) for guess in guesses], device=device)
        shares = torch.tensor([guess.share for guess in guesses], device=device)
        losses, agreements = losses / counts, agreeing / counts
        ctx.mark_non_differentiable(losses, agreements)
        return torch.dot(losses, shares), losses, agreements

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> Any:
        # In place, and handed over: gradients of weights are as large as the weights.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a chunked loss can be taken once")
        return None, *(gradient.mul_(slope) for gradient in gradients)


class Part(NamedTuple):
    """A guess in a chunk: the sum of its losses, agreeing positions, and the sum's gradients."""

    loss: Tensor
    agreeing: Tensor
    states: Tensor
    weights: Sequence[Tensor]


def compare(guess: Guess, states: Tensor, law: Tensor, job: Job) -> Part:
    """states: [m, H] of a guess. law: [m, N] the target's at these positions."""
    # 1. Logits, with a graph from the states and output weights alone.
    states = states.detach().requires_grad_(job.gradient)
    with torch.set_grad_enabled(job.gradient):
        logits = guess.output(states)

    # 2. Loss and gradient. The gradient is that of the sum: divided by the number of positions,
    #    much of it would be too small for float16.
    logs = precise(logits.detach()).log_softmax(-1)
    agreeing = (logs.argmax(-1) == law.argmax(-1)).sum()
    values, slope = job.loss.of(law, logs)
    if not job.gradient:
        return Part(values.sum(), agreeing, states, ())
    slopes = torch.autograd.grad(logits, (states, *guess.weights), slope.to(logits.dtype))
    return Part(values.sum(), agreeing, slopes[0], slopes[1:])


def precise(x: Tensor) -> Tensor:
    """In float32, or float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()
