"""The seam between a run and the loss of a kind of head: a Batch goes in, a Loss comes out."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.tokens import LawTokens


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


# (options, target, head, batch) -> its loss. The head may be wrapped for several processes.
Objective = Callable[[TrainConfig, Target, nn.Module, Batch], Loss]
