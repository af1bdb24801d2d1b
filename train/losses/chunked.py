"""The loss of draft laws over a whole vocabulary, a chunk of positions at a time.

Logits of all counted positions would take most of a run's memory: at 49,152 tokens 200 kB a
position in float32, several times over and for each draft step. So the forward pass computes a
chunk's laws, its loss and the gradient at its logits, which is known in closed form
(`train.losses.tokens`), and keeps no more than the gradients of hidden states and output weights.
The backward pass only scales them:

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

from treespec.train.losses.tokens import TokenLoss

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
    most likely token is the target's.
    """

    total: Tensor
    losses: Tensor
    agreements: Tensor


def token_losses(
    guesses: Sequence[Guess], laws: Laws, places: Tensor, loss: TokenLoss, rows: int | None = None
) -> TokenLosses:
    """The losses of draft steps against the target's laws, each the mean over its positions.

    places: [M] int64; guess i, from 0, reaches the positions whose place is i or more, in order.
    rows: positions per chunk. Default: as many as keep the memory within `BUDGET`.
    """
    # 1. Zeros to add to, and the positions that each guess reaches, by chunk.
    device = places.device
    rows = rows or chunk_rows(laws.count, laws.width, device, loss.bytes)
    weights = list({id(weight): weight for guess in guesses for weight in guess.weights}.values())
    learnt = [*(guess.states for guess in guesses), *weights]
    slopes: dict[int, Tensor] = {}
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in learnt):
        slopes = {id(tensor): torch.zeros_like(tensor) for tensor in learnt}
    losses, agreeing = torch.zeros(2, len(guesses), device=device)
    starts = torch.arange(0, laws.count + rows, rows, device=device)
    reached = [(places >= i).nonzero().squeeze(1) for i in range(len(guesses))]
    before = [torch.searchsorted(positions, starts).tolist() for positions in reached]

    for number, start in enumerate(range(0, laws.count, rows)):
        # 2. The target's laws of a chunk, in its own precision, once for all guesses.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            chunk = laws.of(slice(start, start + rows))
        for i, guess in enumerate(guesses):
            # 3. A guess's part of them, its loss and its gradients.
            first, end = before[i][number : number + 2]
            if first == end:
                continue
            law = chunk if end - first == len(chunk) else chunk[reached[i][first:end] - start]
            values, agrees, gradients = compare(guess, guess.states[first:end], law, loss, slopes)
            losses[i] += values
            agreeing[i] += agrees
            if gradients:
                share = guess.share / len(guess.states)
                slopes[id(guess.states)][first:end] = gradients[0] * share
                for weight, slope in zip(guess.weights, gradients[1:], strict=True):
                    slopes[id(weight)].add_(slope, alpha=share)

    # 4. Means.
    counts = torch.tensor([max(len(guess.states), 1) for guess in guesses], device=device)
    losses, agreements = losses / counts, agreeing / counts
    total = torch.dot(losses, torch.tensor([guess.share for guess in guesses], device=device))
    if slopes:
        total = Scaled.apply(total, [slopes.pop(id(tensor)) for tensor in learnt], *learnt)
    return TokenLosses(total, losses, agreements)


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
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a chunked loss can be taken once")
        return None, None, *(gradient.mul_(slope) for gradient in gradients)


def chunk_rows(count: int, width: int, device: torch.device, size: int = 28) -> int:
    """Rows of a chunk of `count` rows of `width` numbers, which take `size` bytes each."""
    elements = ON_CPU if device.type == "cpu" else ELSEWHERE
    return max(1, min(elements // width, BUDGET * count // size))


def compare(
    guess: Guess, states: Tensor, law: Tensor, loss: TokenLoss, slopes: dict[int, Tensor]
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The sum of a guess's losses in a chunk, its agreeing positions, and the sum's gradients.

    states: [m, H]. law: [m, N] the target's at these positions. slopes: none if no gradient is
    wanted. The gradients are those at the states and at the guess's weights.
    """
    # 1. Logits, with a graph from the states and output weights alone.
    states = states.detach().requires_grad_(bool(slopes))
    with torch.set_grad_enabled(bool(slopes)):
        logits = guess.output(states)

    # 2. Loss and gradient. The gradient is that of the sum: divided by the number of positions,
    #    much of it would be too small for float16.
    with torch.no_grad():
        logs = precise(logits).log_softmax(-1)
        agreeing = (logs.argmax(-1) == law.argmax(-1)).sum()
        values, slope = loss.of(law, logs)
    if not slopes:
        return values.sum(), agreeing, ()
    gradients = torch.autograd.grad(logits, (states, *guess.weights), slope.to(logits.dtype))
    return values.sum(), agreeing, gradients


def precise(x: Tensor) -> Tensor:
    """In float32, or float64 where it is that already."""
    return x if x.dtype == torch.float64 else x.float()
