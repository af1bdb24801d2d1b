"""The seam of block heads, which draft all levels of a tree in one forward.

The law of a level depends on the text alone, not on the tokens that are drafted above it. Behind
the pairs of the text (a feature, and the token after it) a forward has a block of further rows:

    columns     | cached pairs | n new pairs | S block rows |
    positions     0 1 2 …        …             that of the last token, and on from it
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from treespec.heads.head import Embed, Head, OutputPath
from treespec.heads.layers import KeyValues


class Pairs(NamedTuple):
    """n new pairs of each text, and what a forward over them and a block of S rows sees.

    tokens: [B, n] int64, each the one after its feature. features: [B, n, F] the target's. places:
    [B, T] the positions of all T columns. seen: [B, n + S, T] bool; a block row sees its text's
    pairs and the whole block.
    """

    tokens: Tensor
    features: Tensor
    places: Tensor
    seen: Tensor


class BlockHead(Head):
    """A head that drafts `max_depth` levels at once.

    block: S, the rows that it adds behind the pairs. layer_count: layers with keys and values.
    """

    max_depth: int
    block: int
    layer_count: int

    @abstractmethod
    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor | None, Tensor]:
        """One forward over new pairs, and over a block unless `roots` is None.

        roots: [B] the texts' last tokens. caches: of each layer. embed: the target's own embedding.
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
