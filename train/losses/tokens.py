"""The losses between the target's distribution p and the head's q, computed in chunks of positions.

These are the values of `--loss`. α = Σ min(p, q) is the probability that a single draft token is accepted:

    loss              value
    cross-entropy     -Σ p log q
    tv                1 - α

p sums to less than 1 if a draft vocabulary leaves tokens out: these are never accepted. Cross-entropy
divides p by its sum, as published. A position has no loss if p sums to 0.

Logits of all counted positions would take most of a run's memory: at 49,152 tokens 200 kB a position in
float32, in several copies and for each draft step. So the forward pass computes a chunk's logits, its loss
and the gradients, and keeps only the gradients of hidden states and output weights. The backward pass scales
these. Ten positions in chunks of four:

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

MIN_PROBABILITY = torch.finfo(torch.float32).tiny
# Most bytes of a chunk's arrays, for each counted position and token of the vocabulary.
BYTES_PER_LOGIT = 6
# Most elements of a chunk's array. On a CPU 8 MB in float32: the heap reuses such arrays, and caches hold
# parts of them. On other devices more, because large products are faster there.
CHUNK_LOGITS_ON_CPU = 2 << 20
CHUNK_LOGITS_ELSEWHERE = 64 << 20

TokenLoss = Callable[[Tensor, Tensor], Tensor]  # (p [M, N], log q [M, N]) -> losses [M]


def compute_cross_entropy(p: Tensor, logs: Tensor) -> Tensor:
    """Compute -Σ p log q for each position [M], with p divided by its sum. logs: log q [M, N]."""
    return -(p * logs).sum(-1) / sum_mass(p)


def compute_rejection_rate(p: Tensor, logs: Tensor) -> Tensor:
    """Compute 1 - α for each position [M], the probability that a draft token is rejected. logs: log q [M, N]."""
    return 1 - torch.minimum(p, logs.exp()).sum(-1)


def sum_mass(p: Tensor) -> Tensor:
    """[M] the sum of each row of p, at least `MIN_PROBABILITY`, to divide by."""
    return p.sum(-1).clamp(min=MIN_PROBABILITY)


TOKEN_LOSSES: dict[str, TokenLoss] = {  # by `--loss`
    "published": compute_cross_entropy,
    "cross-entropy": compute_cross_entropy,
    "tv": compute_rejection_rate,
}


class Teacher(NamedTuple):
    """The distributions that a head learns, at the counted positions, computed in chunks.

    Attributes:
        width: the largest number of logits that a position needs, usually V.
        of: (slice of the positions) -> probabilities [m, N] in float32 or float64. A row may sum to less than 1.
    """

    width: int
    of: Callable[[slice], Tensor]


class StepLogits(NamedTuple):
    """The output of one draft step, or of the head of one depth: a guess at the target's distributions.

    Attributes:
        states: [M_i, H] its hidden states at the counted positions that it reaches.
        output: states [m, H] -> logits [m, N].
        share: the factor of its loss in the total.
        weights: the parameters of `output` that are trained.
    """

    states: Tensor
    output: Callable[[Tensor], Tensor]
    share: float = 1.0
    weights: tuple[nn.Parameter, ...] = ()

    @classmethod
    def from_output_layers(
        cls, steps: Iterable[Tensor], layers: Iterable[nn.Module], decay: float
    ) -> list["StepLogits"]:
        """Build a guess for each step from its states and output layer. The share of step i is decay^i."""
        guesses = []
        for number, (states, layer) in enumerate(zip(steps, layers, strict=False)):
            guesses.append(cls(states, layer, decay**number, tuple(layer.parameters())))
        return guesses


class Loss(NamedTuple):
    """The loss of a forward. All numbers are sums over its counted positions, divided by `position_counts`.

    Attributes:
        total: the number to minimise.
        parts: by name, further numbers for reports, without gradients.
    """

    total: Tensor
    parts: dict[str, Tensor]


class TargetChunk(NamedTuple):
    """The target's distributions at the m counted positions of a chunk.

    Attributes:
        probabilities: [m, N].
        sums: [m] the sum of each distribution.
        best: [m] the most likely token of each distribution.
    """

    probabilities: Tensor
    sums: Tensor
    best: Tensor


@final
class LossSums:
    """Sums over the chunks so far, for each guess.

    Attributes:
        guesses: the guesses.
        done: the number of counted positions so far, for each guess.
        losses: the sum of each guess's losses.
        agreeing: the number of positions at which a guess's most likely token is the target's.
        state_gradients: the gradients at each guess's states [M_i, H].
        weight_gradients: the gradient at each trained output weight; guesses may share a weight.
        divisors: what each guess's sums are divided by.
    """

    def __init__(
        self, guesses: Sequence[StepLogits], divisors: Sequence[float], device: torch.device
    ) -> None:
        self.guesses = guesses
        self.divisors = divisors
        self.done = [0] * len(guesses)
        self.losses = torch.zeros(len(guesses), device=device, dtype=torch.float32)
        self.agreeing = torch.zeros(len(guesses), device=device, dtype=torch.float32)
        self.state_gradients = [torch.zeros_like(guess.states) for guess in guesses]
        self.weight_gradients: dict[nn.Parameter, Tensor] = {}
        for guess in guesses:
            for weight in guess.weights:
                self.weight_gradients[weight] = torch.zeros_like(weight)

    def add(self, number: int, chunk: TargetChunk, reached: Tensor, loss_of: TokenLoss) -> None:
        """Add a guess's loss over a chunk, and its gradients.

        Args:
            number: the number of the guess, from 0.
            chunk: the target's distributions.
            reached: [m] bool: whether the guess reaches each position of the chunk.
            loss_of: (p, log q) -> the loss of each position.
        """
        # 1. The part of the chunk that the guess reaches.
        guess = self.guesses[number]
        count = int(reached.sum())
        if count == 0:
            return
        rows = slice(self.done[number], self.done[number] + count)
        self.done[number] = rows.stop
        p = chunk.probabilities
        if count < len(p):
            p = p[reached]
        learns = chunk.sums[reached] > 0
        likely = chunk.best[reached]

        # 2. Its loss and the gradients of the summed loss. The mean's gradients would be too small for float16;
        #    they are divided afterwards.
        states = guess.states[rows].detach().requires_grad_()
        logs = to_float32(guess.output(states)).log_softmax(-1)
        loss = loss_of(p, logs).where(learns, 0).sum()
        gradients = torch.autograd.grad(loss, (states,) + guess.weights)
        self.losses[number] += loss.detach()
        self.agreeing[number] += (learns & (logs.max(-1).indices == likely)).sum()
        share = guess.share / self.divisors[number]
        self.state_gradients[number][rows] = gradients[0] * share
        for weight, gradient in zip(guess.weights, gradients[1:], strict=True):
            self.weight_gradients[weight].add_(gradient, alpha=share)

    def to_loss(self) -> Loss:
        """Build the loss: means over the positions, with the gradients that were computed already."""
        device = self.losses.device
        counts = torch.tensor(self.divisors, dtype=torch.float32, device=device)
        means = self.losses / counts
        parts: dict[str, Tensor] = {}
        for step, (mean, share) in enumerate(
            zip(means, self.agreeing / counts, strict=True), start=1
        ):
            parts[f"token_{step}"] = mean
            parts[f"agreement_{step}"] = share
        shares = torch.tensor(
            [guess.share for guess in self.guesses], dtype=torch.float32, device=device
        )
        learnt_tensors = [guess.states for guess in self.guesses] + list(self.weight_gradients)
        gradients = self.state_gradients + list(self.weight_gradients.values())
        total = Scaled.apply(torch.dot(means, shares), gradients, *learnt_tensors)
        return Loss(total, parts)


def compute_token_losses(
    guesses: Sequence[StepLogits],
    teacher: Teacher,
    places: Tensor,
    loss: str,
    rows: int | None = None,
    position_counts: Sequence[float] = (),
    reached: Tensor | None = None,
) -> Loss:
    """Compute the loss of each draft step against the target, as means over positions, in chunks.

    Args:
        guesses: a guess for each draft step, or each depth.
        teacher: the target's distributions at all counted positions.
        places: [M] int64 the place of each counted position (see `treespec.train.losses.objectives`). Guess i,
            from 0, reaches the positions with place i or more, in order.
        loss: the name of the loss, a value of `--loss`.
        rows: positions per chunk; default: `choose_chunk_rows`.
        position_counts: what the sums of guess 1, 2, … are divided by, where a step has several forwards; default:
            the number of positions that the guess reaches.
        reached: [G, M] bool, the positions that each guess reaches; default: by their places.

    Returns:
        The sum of the guesses' losses times their shares. Its parts are, for guess 1, 2, …, the loss
        (`token_1`) and the share of positions with the target's most likely token (`agreement_1`).
    """
    device = places.device
    loss_of = TOKEN_LOSSES[loss]
    if rows is None:
        rows = choose_chunk_rows(teacher.width, len(places), loss_of, device)
    sums = LossSums(guesses, choose_divisors(guesses, position_counts), device)
    for start in range(0, len(places), rows):
        positions = slice(start, start + rows)
        chunk = compute_target_chunk(teacher, positions, device)
        for number in range(len(guesses)):
            if reached is None:
                reaches = places[positions] >= number
            else:
                reaches = reached[number, positions]
            sums.add(number, chunk, reaches, loss_of)
    return sums.to_loss()


def choose_divisors(guesses: Sequence[StepLogits], position_counts: Sequence[float]) -> list[float]:
    """Choose what each guess's sums are divided by: its count, or else its own positions; never 0."""
    divisors = []
    for number, guess in enumerate(guesses):
        count: float = len(guess.states)
        if number < len(position_counts):
            count = position_counts[number]
        if count == 0:
            count = 1.0
        divisors.append(count)
    return divisors


def choose_chunk_rows(width: int, positions: int, loss_of: TokenLoss, device: torch.device) -> int:
    """Choose the number of positions of a chunk, within an array's limit and the limit `BYTES_PER_LOGIT`.

    Args:
        width: the number of logits of a position, V.
        positions: the number of all counted positions.
        loss_of: the loss, which decides how many arrays a chunk has at once.
        device: where the chunk is computed.
    """
    row_bytes = 36  # bytes of all arrays for each logit of a chunk
    if loss_of is compute_cross_entropy:
        row_bytes = 28
    elements = CHUNK_LOGITS_ELSEWHERE
    if device.type == "cpu":
        elements = CHUNK_LOGITS_ON_CPU
    return max(1, min(elements // width, BYTES_PER_LOGIT * positions // row_bytes))


@torch.no_grad()
def compute_target_chunk(teacher: Teacher, positions: slice, device: torch.device) -> TargetChunk:
    """Compute the target's distributions of a chunk, without autocast, once for all guesses."""
    with torch.autocast(device.type, enabled=False):
        probabilities = teacher.of(positions)
        best = probabilities.max(-1).indices  # faster than argmax
        return TargetChunk(probabilities, probabilities.sum(-1), best)


@final
class Scaled(torch.autograd.Function):
    """Autograd function of a total with known gradients at `tensors`: the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        # In place, and not kept: gradients of weights are as large as the weights.
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError("the gradients of a chunked loss can be taken once")
        scaled = [gradient.mul_(slope) for gradient in gradients]
        return (None, None) + tuple(scaled)


def to_float32(x: Tensor) -> Tensor:
    """Convert to float32; float64 stays as it is."""
    if x.dtype == torch.float64:
        return x
    return x.float()
