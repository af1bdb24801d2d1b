"""Gumbel noise by position: sampling becomes the choice of the largest score, for target and drafts alike.

token                a      b      c
log p              -0.5   -1.2   -2.3
noise              -0.9    1.1    0.4
sum                -1.4   -0.1   -1.9     the output is b, with probability p(b) over the noise
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor

from treespec.trees.tree import to_device

KEPT_LEVELS = 64  # positions whose noise is kept: more than a tree is deep
LEVELS_AT_ONCE = 8  # positions made at once on an accelerator, where they take no longer than one
SPLITMIX_STEP = 0x9E3779B97F4A7C15  # odd: from token to token
LEVEL_SKIP = 0xD1342543DE82EF95  # odd: from position to position
# SplitMix64 (Steele et al. 2014): shift and factor of each round.
SPLITMIX_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))

Kernel = Callable[[Sequence[int], int], Tensor]


@final
class Noise:
    """The noise of one sequence: [V] numbers at each position, a function of the seed, the position and the token.

    The token with the largest log p + noise has distribution p (Gumbel 1954). So the output depends on the
    target and the seed alone. A draft token with the largest log q + the same noise often is that token.
    No generator is used: the numbers are the same on every device, up to the rounding of logarithms.

    position: of the next token, 0 for the first of the completion.
    """

    def __init__(
        self, seed: int, size: int, device: torch.device, kernel: Kernel | None = None
    ) -> None:
        """seed: of the sequence, in [0, 2^64). size: V. kernel: gives a CPU the numbers of `sample_gumbel`."""
        self.seed = seed
        self.size = size
        self.device = device
        self.position = 0
        self.make: Kernel = partial(sample_gumbel, device=device)
        if kernel:
            self.make = kernel
        self.made: dict[int, Tensor] = {}

    def get_level(self, depth: int) -> Tensor:
        """[V] float32 noise of the token that follows a node of this depth; the root has depth 0."""
        place = self.position + depth
        if place not in self.made:
            if len(self.made) >= KEPT_LEVELS:
                self.made = {at: noise for at, noise in self.made.items() if at >= self.position}
            count = LEVELS_AT_ONCE
            if self.device.type == "cpu":
                count = 1
            places = range(place, place + count)
            starts = [to_int64(self.seed + at * LEVEL_SKIP) for at in places]
            self.made.update(zip(places, self.make(starts, self.size), strict=True))
        return self.made[place]


def sample_gumbel(starts: Sequence[int], size: int, device: torch.device) -> Tensor:
    """[P, size] float32 independent Gumbel numbers: the SplitMix64 streams from P starts, as int64.

    The uniform below them has 53 bits, so that its tail is that of the distribution.
    """
    bits = build_splitmix_steps(size, device) + to_device([[start] for start in starts], device)
    for shift, factor in SPLITMIX_ROUNDS:
        bits ^= (bits >> shift).bitwise_and_((1 << 64 - shift) - 1)  # a shift that brings zeros
        bits *= to_int64(factor)
    bits = (bits >> 11).bitwise_and_((1 << 53) - 1)
    bits.clamp_max_((1 << 53) - 2)  # the largest would round to 1, whose noise is infinite
    uniform = bits.double().add_(0.5).mul_(2.0**-53)
    return uniform.log_().neg_().float().log_().neg_()


@lru_cache(8)
def build_splitmix_steps(size: int, device: torch.device) -> Tensor:
    """[size] int64 multiples of STEP modulo 2^64, from 1 on."""
    return torch.arange(1, size + 1, device=device) * to_int64(SPLITMIX_STEP)


def to_int64(number: int) -> int:
    """The int64 with the bits of a number modulo 2^64."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
