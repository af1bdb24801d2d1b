"""The laws that a head learns from, at the counted positions, computed a chunk at a time.

Five tokens, of which d and e are the assistant's. The target's state at position t has the law of
token t + 1, and a position's place says how many draft steps reach it:

    token              a  b  c  d  e
    state              h0 h1 h2 h3           counted: h2 (law of d) and h3 (law of e)
    place                 0  1  2            from the second state on
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from treespec.model.target import Target
from treespec.train.losses.chunked import Laws, chunk_rows, precise


def counted(loss_mask: Tensor) -> Tensor:
    """[B, T] bool, true at the assistant's tokens -> [B, T - 2], which positions count."""
    return loss_mask[:, 2:]


def states_of(features: Tensor, counts: Tensor) -> Tensor:
    """[B, T, H] the target's last hidden states -> [M, H] those of the counted positions."""
    return features[:, 1:-1][counts]


def places_of(counts: Tensor) -> Tensor:
    """[B, T - 2] -> [M] int64, the place of each counted position."""
    return counts.nonzero()[:, 1]


def target_laws(states: Tensor, logits: Callable[[Tensor], Tensor], width: int) -> Laws:
    """The target's own laws. states: [M, H]. logits: [m, H] -> [m, width] of its output path."""
    return Laws(len(states), width, lambda chunk: precise(logits(states[chunk])).softmax(-1))


def text_laws(tokens: Tensor, vocab_size: int) -> Laws:
    """All mass on the text's tokens [M]."""

    def laws(chunk: slice) -> Tensor:
        some = tokens[chunk, None]
        zeros = torch.zeros(len(some), vocab_size, device=tokens.device)
        return zeros.scatter_(1, some, 1.0)

    return Laws(len(tokens), vocab_size, laws)


def drafted_laws(target: Target, states: Tensor, vocabulary: Tensor) -> tuple[Tensor, Laws]:
    """The target's laws over a draft vocabulary, where its most likely token is in it.

    states: [M, H]. vocabulary: [Vd] int64. Returns which positions these are, [M] bool, and their
    laws. A law's sum is the mass that the target has on the vocabulary.
    """
    # 1. A pass over all tokens keeps two numbers a position: its most likely token, and the logarithm
    #    of its softmax's denominator.
    most_likely = torch.zeros(len(states), dtype=torch.int64, device=states.device)
    scales = torch.zeros(len(states), device=states.device)
    rows = chunk_rows(len(states), target.vocab_size, states.device)
    for start in range(0, len(states), rows):
        chunk = slice(start, start + rows)
        with torch.autocast(states.device.type, enabled=False):
            logits = target.output_logits(states[chunk])
        most_likely[chunk] = logits.argmax(-1)
        scales[chunk] = precise(logits).logsumexp(-1).to(scales.dtype)
    drafted = torch.isin(most_likely, vocabulary)

    # 2. The laws, over the vocabulary alone.
    states, scales = states[drafted], scales[drafted]
    output = target.output_rows(vocabulary)

    def laws(chunk: slice) -> Tensor:
        logits = precise(target.output_logits(states[chunk], output))
        return logits.sub_(scales[chunk, None]).exp_()

    return drafted, Laws(len(states), len(vocabulary), laws)


DRAWN = 1024  # random tokens a batch


@final
@dataclass(frozen=True)
class LawTokens:
    """frequent: [N] int64 ascending. others: int64, of which a batch draws some; may be none."""

    frequent: Tensor
    others: Tensor

    @classmethod
    def of(cls, frequent: Tensor, drafted: Tensor) -> "LawTokens":
        """drafted: [D] int64, the tokens that the head will draft; batches draw from the others."""
        return cls(frequent, drafted[~torch.isin(drafted, frequent)])

    @property
    def width(self) -> int:
        """Tokens in one batch."""
        return len(self.frequent) + min(DRAWN, len(self.others))

    def logits(self, target: Target, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """[M, H] -> [M, N + drawn] logits for one batch. generator: draws its other tokens."""
        drawn = min(DRAWN, len(self.others))
        if not drawn:
            rows = target.output_rows(self.frequent)
            return lambda hidden: target.output_logits(hidden, rows)
        chosen = torch.randint(
            len(self.others), (drawn,), generator=generator, device=generator.device
        ).to(self.others.device)
        rows = target.output_rows(torch.cat([self.frequent, self.others[chosen]]))
        weights = torch.zeros(len(self.frequent) + drawn, device=target.output_device)
        weights[len(self.frequent) :] = math.log(len(self.others) / drawn)
        return lambda hidden: target.output_logits(hidden, rows) + weights


class Batch(NamedTuple):
    """Conversations of one forward, padded on the right.

    tokens: [B, T] int64. loss_mask: [B, T] bool, true at the assistant's tokens. features: [B, T,
    F] the target's.
    lengths: [B] tokens of each conversation. generator: draws this batch's noise, on the device of
    the features.
    steps: draft steps to train over, from step 2 on the head's own features.
    law_tokens: what EAGLE-1's loss between laws is over; None is all tokens.
    """

    tokens: Tensor
    loss_mask: Tensor
    features: Tensor
    lengths: Tensor
    generator: torch.Generator
    steps: int = 1
    law_tokens: LawTokens | None = None


class Loss(NamedTuple):
    """total: what a step lowers. parts: what a run reports beside it.

    All are means over the counted positions.
    """

    total: Tensor
    parts: dict[str, Tensor]
