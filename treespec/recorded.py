"""One cycle of one text as the decoder saw it, for whoever listens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from treespec.shaping.law import Path
from treespec.trees.tree import TokenTree
from treespec.verify.walk import Verdict

if TYPE_CHECKING:
    from treespec.texts import Piece


@dataclass(frozen=True)
class Recorded:
    """tree: as it was drafted. logits: [N, V] the target's, shaped. draft_logits: by the path of
    each expanded node, [V], or [M, V] of M draft models; shaped. answer: what the cycle adds.
    """

    tree: TokenTree
    logits: Tensor
    draft_logits: dict[Path, Tensor]
    verdict: Verdict
    answer: "list[Piece]"


Listener: TypeAlias = Callable[[Recorded], None]
