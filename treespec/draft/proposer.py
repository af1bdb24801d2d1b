"""The seam of draft models: draft logits for tree nodes, a level at a time."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from treespec.draft.per_text import Observer

if TYPE_CHECKING:
    from treespec.heads.head import Head
    from treespec.model.cache import TreeCache  # transformers comes with it, and with heads


PREFILL_AT = 32  # more new tokens than any accepted path: this is a prompt, run it at once


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children are to be drafted.

    tokens: [F] draft tokens, numbered as the logits are. parent_rows: [F] the row of each node's
    parent in the frontier above; 0 for the root.
    """

    tokens: Tensor
    parent_rows: Tensor


def aligned(
    frontiers: Sequence[Frontier | None], device: torch.device
) -> tuple[Tensor, Tensor, list[int]]:
    """Frontiers of B texts side by side: [B, F] tokens, [B, F] parent rows, nodes of each text.

    Shorter frontiers are padded with 0. None counts as a frontier without nodes.
    """
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    tokens = [frontier.tokens if frontier else nothing for frontier in frontiers]
    parents = [frontier.parent_rows if frontier else nothing for frontier in frontiers]
    sizes = [len(row) for row in tokens]
    return pad_sequence(tokens, batch_first=True), pad_sequence(parents, batch_first=True), sizes


class Proposer(Observer):
    """Observes B texts, one at first, and drafts for them.

    The calls of a cycle: begin, extend for each level, observe.
    head: the trained head that it drafts with, if any. law_per_draw: whether it combines M draft
    models, whose draws take turns; its logits are then [F, M, N] in place of [F, N].
    at_once: whether the law of a level depends on the text alone; `levels` then gives all laws.
    """

    head: "Head | None" = None
    law_per_draw: bool = False
    at_once: bool = False
    vocab_size: int  # V of the target

    @property
    def name(self) -> str:
        """For people; "" stands for its class."""
        return f"{self.head.kind} head" if self.head else ""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it observes as features; () is the last hidden state."""
        return self.head.taps if self.head else ()

    @property
    def max_depth(self) -> int | None:
        """Levels that it can draft; None: any number."""
        return self.head.max_depth if self.head else None

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""
        return self.head.vocabulary if self.head else None

    @property
    def models(self) -> list[nn.Module]:
        """The draft models that it computes with besides the target."""
        return [cast(nn.Module, self.head)] if self.head else []

    @property
    def identity(self) -> object:
        """All that the cost of its forwards depends on, in JSON's types."""
        drafted = self.vocab_size if self.vocabulary is None else len(self.vocabulary)
        return [self.head.config if self.head else None, drafted]

    @abstractmethod
    def begin(self, roots: Tensor, cache: "TreeCache") -> list[Tensor | None]:
        """For each text [1, N] draft logits for the children of its root.

        None for a text of which nothing was observed. roots: [B] int64. cache: the target's keys
        and values of the committed texts, for drafts by the target itself. Keys and values written
        behind them are dropped.
        """

    @abstractmethod
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        """For each text [F, N] draft logits for its frontier's children; [0, N] without one."""

    def levels(self, row: int) -> Tensor:
        """[D, N] draft logits of all levels of a text's tree, between `begin` and `extend`."""
        raise TypeError(f"{type(self).__name__} drafts level by level")
