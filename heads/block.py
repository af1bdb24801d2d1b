"""The seam of block heads, which draft all levels of a tree in one forward.

The law of a level depends on the text alone, not on the tokens that are drafted above it. Behind
the pairs of the text (a feature, and the token after it) a forward has a block of further rows:

    columns     | cached pairs | n new pairs | S block rows |
    positions     0 1 2 …        …             that of the last token, and on from it
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from treespec.heads.head import Config, OutputPath, Tensors
from treespec.heads.layers import KeyValues

Embed = Callable[[Tensor], Tensor]  # [...] tokens -> [..., H] the first layer's input


class BlockHead(nn.Module, ABC):
    """A head that drafts `max_depth` levels at once.

    block: S, the rows that it adds behind the pairs. layers: those with keys and values.
    """

    kind: str
    known_as: ClassVar[str]
    optional: ClassVar[frozenset[str]]
    config: Config
    max_depth: int
    taps: tuple[int, ...]
    block: int
    layer_count: int
    vocab_size: int

    @property
    @abstractmethod
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """H, the width of the states that it computes."""

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """F, the width of the target's features, all taps together."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the features that it takes."""

    @property
    @abstractmethod
    def lacks_embedding(self) -> bool:
        """Whether it must be given the target's embedding."""

    @abstractmethod
    def settle_taps(self, layers: int) -> None:
        """If the config names no taps, take the published ones for a target of `layers` layers."""

    @abstractmethod
    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        """Take the target's embedding [V, E] in place of an equal copy of it, or of none."""

    @abstractmethod
    def restrict(self, tokens: Tensor, target: OutputPath) -> None:
        """Draft only these of the target's tokens from now on, [N] int64 ascending."""

    @abstractmethod
    def fill(self, tensors: Tensors) -> None:
        """Take a checkpoint's tensors. Raises ValueError where they contradict each other."""

    @abstractmethod
    def run(
        self,
        tokens: Tensor,
        features: Tensor,
        roots: Tensor | None,
        places: Tensor,
        seen: Tensor,
        caches: Sequence[KeyValues],
        embed: Embed,
    ) -> tuple[Tensor | None, Tensor]:
        """One forward over n new pairs of each text, and over a block unless `roots` is None.

        tokens: [B, n] int64, each the one after its feature. features: [B, n, F] the target's.
        roots: [B] the texts' last tokens. places: [B, T] the positions of all T columns.
        seen: [B, n + S, T] bool; a block row sees its text's pairs and the whole block.
        caches: of each layer. embed: the target's own embedding.
        Returns the pairs' states [B, n, H], if it has any, and the block's [B, S, H].
        """

    @abstractmethod
    def drafted(self, last: Tensor | None, block: Tensor) -> Tensor:
        """[B, D, H] the states of all levels. last: [B, H] of the last pairs. block: [B, S, H]."""

    @abstractmethod
    def logits(self, states: Tensor, target: OutputPath) -> Tensor:
        """[..., H] states of `drafted` -> [..., N] logits of the draft tokens."""


def check_mask_token(token: object, vocab_size: int) -> None:
    """Raises ValueError for a mask token that has no embedding."""
    if not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ValueError(f"mask_token_id is {token!r}, must be a token below {vocab_size}")
