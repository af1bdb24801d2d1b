"""Gumbel noise by position, shared by target and drafter: sampling becomes the choice of the largest score.

token                a      b      c
log p              -0.5   -1.2   -2.3
noise              -0.9    1.1    0.4
sum                -1.4   -0.1   -1.9     the output is b, with probability p(b) over the noise

All nodes of a level share the noise of one position, whatever their paths. Of a tree whose root r comes
before position 7 of the completion:

    node                       r ─┬─ a ── c
                                  └─ b ── d
    depth                      0     1    2
    noise of the next token    7     8    9      `get_level(depth)` is the noise of this position

If the cycle accepts a and adds one token after it, `position` is 9, and the noise of the new root is
what the noise of c and d was.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor

from treespec.trees.tree import to_device

KEPT_LEVELS = 64  # positions whose noise is cached: more than a tree is deep
LEVELS_AT_ONCE = 8  # positions computed together on an accelerator, in the time of one
SPLITMIX_STEP = 0x9E3779B97F4A7C15  # odd: added from token to token
LEVEL_SKIP = 0xD1342543DE82EF95  # odd: added from position to position
# SplitMix64 (Steele et al. 2014): shift and factor of each round.
SPLITMIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

Kernel = Callable[[Sequence[int], int, Tensor | None], Tensor]


@final
class Noise:
    """The noise of one sequence: a number for each position and token, computed from these and the seed.

    The token with the largest log p + noise has distribution p (Gumbel 1954). So the output depends only
    on the target and the seed. The draft token with the largest log q + the same noise often is that token.
    No generator is used: the numbers are the same on every device, up to the rounding of logarithms.

    Attributes:
        seed: Of the sequence.
        size: V.
        device: Of the noise.
        position: Of the next token; 0 for the first token of the completion.
        make: Computes the noise of several positions, as `sample_gumbel` does.
        made: The cached noise, by position.
    """

    def __init__(
        self, seed: int, size: int, device: torch.device, kernel: Kernel | None = None
    ) -> None:
        """seed: of the sequence, in [0, 2^64). size: V. kernel: a faster `sample_gumbel` for a CPU."""
        self.seed = seed
        self.size = size
        self.device = device
        self.position = 0
        self.make: Kernel = partial(sample_gumbel, device=device)
        if kernel:
            self.make = kernel
        self.made: dict[int, Tensor] = {}

    def get_level(self, depth: int) -> Tensor:
        """Return the [V] float32 noise of the token that follows a node of this depth; the root has depth 0."""
        level_position = self.position + depth
        if level_position not in self.made:
            if len(self.made) >= KEPT_LEVELS:
                self.made = {
                    position: noise
                    for position, noise in self.made.items()
                    if position >= self.position
                }
            count = LEVELS_AT_ONCE
            if self.device.type == "cpu":
                count = 1
            starts = list(map(self.get_start, range(depth, depth + count)))
            noise = self.make(starts, self.size, None).unbind()
            self.made.update(enumerate(noise, level_position))
        return self.made[level_position]

    def get_start(self, depth: int) -> int:
        """Return the int64 state from which the noise of a level is computed, as `get_level`."""
        return to_int64(self.seed + (self.position + depth) * LEVEL_SKIP)

    def compute_for_tokens(self, depth: int, tokens: Tensor) -> Tensor:
        """Compute [N] float32 the noise of some tokens [N], as `get_level`: less work than all of it."""
        return self.make([self.get_start(depth)], self.size, tokens)[0]


def sample_gumbel(
    starts: Sequence[int], size: int, tokens: Tensor | None = None, *, device: torch.device
) -> Tensor:
    """Compute [P, N] float32 independent Gumbel numbers from the SplitMix64 streams of P int64 starts.

    The uniform numbers that they are computed from have 53 bits: fewer would cut off the distribution's tail.

    size: V. tokens: [N] the tokens whose numbers they are; None: all V, in order.
    """
    steps = build_splitmix_steps(size, device)
    if tokens is not None:
        steps = steps[tokens]
    bits = steps + to_device([[start] for start in starts], device)
    for shift, factor in SPLITMIX_ROUNDS:
        bits ^= (bits >> shift).bitwise_and_((1 << 64 - shift) - 1)  # a logical shift of int64
        bits *= to_int64(factor)
    bits = (bits >> 11).bitwise_and_((1 << 53) - 1)
    bits.clamp_max_((1 << 53) - 2)  # the largest would round to a uniform of 1: infinite noise
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().float().log_().neg_()


@lru_cache(8)
def build_splitmix_steps(size: int, device: torch.device) -> Tensor:
    """Compute the [size] int64 multiples 1, 2, … of SPLITMIX_STEP modulo 2^64."""
    return torch.arange(1, size + 1, device=device) * to_int64(SPLITMIX_STEP)


def to_int64(number: int) -> int:
    """Wrap a number modulo 2^64 to the int64 with the same bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
