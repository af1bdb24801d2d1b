"""The input of Medusa's and Hydra's heads: a hidden state for the last position of each text."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from treespec.draft.per_text import PerText
from treespec.draft.proposer import PREFILL_AT, Proposer
from treespec.heads.hydra import HydraHead
from treespec.model.cache import TreeCache
from treespec.model.chunks import causal_chunks
from treespec.model.masks import together
from treespec.model.target import Target


@final
class LastStates(PerText):
    """The target's own hidden states; one text at first. lengths: observed positions, by text."""

    per_text = ("lengths", "last")

    def __init__(self) -> None:
        self.lengths = [0]
        self.last: list[Tensor | None] = [None]

    def observe(self, features: Sequence[Tensor]) -> None:
        """Each text grew by n positions. features: [n, H] hidden states."""
        for row, new in enumerate(features):
            if len(new):
                self.lengths[row] += len(new)
                self.last[row] = new[-1].clone()  # a view would keep the whole prompt's states

    def known(self) -> list[Tensor | None]:
        """For each text the state [H] of its last position, or None if that is not known."""
        return self.last

    def rewind(self, lengths: Sequence[int]) -> None:
        """Truncate each text. A shortened text has no known state until more of it is observed."""
        pairs = zip(self.last, self.lengths, lengths, strict=True)
        self.last = [last if had == length else None for last, had, length in pairs]
        self.lengths = list(lengths)


@final
class PrefixStates(PerText):
    """Outputs of Hydra++'s prefix layer, which attends over the hidden states up to a position.

    Observed states wait until `known` runs the layer over them; those of a prompt run at once.
    Texts with fewer waiting states are padded with states that no position sees.
    """

    per_text = ("waiting", "done", "cache")

    def __init__(self, head: HydraHead, device: torch.device, chunk: int = 512) -> None:
        self.head, self.chunk = head, chunk
        self.nothing = torch.empty(0, head.hidden_size, dtype=head.dtype, device=device)
        self.cache = TreeCache(layers=1)
        self.waiting = [self.nothing]  # [n, H] states, by text
        self.done = LastStates()

    @property
    def lengths(self) -> list[int]:
        texts = zip(self.done.lengths, self.waiting, strict=True)
        return [done + len(states) for done, states in texts]

    def observe(self, features: Sequence[Tensor]) -> None:
        """Each text grew by n positions. features: [n, H] hidden states."""
        pairs = zip(self.waiting, features, strict=True)
        self.waiting = [torch.cat([before, new]) if len(before) else new for before, new in pairs]
        if max(map(len, self.waiting)) > PREFILL_AT:
            self.known()

    @torch.no_grad()
    def known(self) -> list[Tensor | None]:
        """For each text the state [H] of its last position, or None if that is not known."""
        layer, counts = self.cache.tree_layers[0], [len(states) for states in self.waiting]
        device = self.nothing.device
        for chunk in causal_chunks(self.cache, counts, lambda columns: self.chunk, device):
            features = together([states[chunk.columns] for states in self.waiting])  # [B, n, H]
            hidden = self.head.states(features, chunk.positions, chunk.seen[:, None], layer)
            layer.length += features.shape[1]
            self.done.observe([row[:taken] for row, taken in zip(hidden, chunk.taken, strict=True)])
        self.waiting = [self.nothing for _ in self.waiting]
        return self.done.known()

    def rewind(self, lengths: Sequence[int]) -> None:
        """As for `LastStates`."""
        pairs = list(zip(self.waiting, self.done.lengths, lengths, strict=True))
        self.waiting = [states[: max(0, length - done)] for states, done, length in pairs]
        self.done.rewind([min(done, length) for _, done, length in pairs])
        self.cache.rewind(self.done.lengths)


def stacked(states: Sequence[Tensor | None]) -> Tensor:
    """[B, H] the states, 0 where one is None. At least one is not."""
    zeros = torch.zeros_like(next(state for state in states if state is not None))
    return torch.stack([zeros if state is None else state for state in states])


class StateProposer(Proposer, Protocol):
    """Drafts with heads that take the state of each text's last position; one text at first.

    A subclass has `start`, `extend` and `new`.
    """

    target: Target
    observed: LastStates | PrefixStates
    per_text: ClassVar[tuple[str, ...]] = ("observed",)

    @abstractmethod
    def start(self, states: Tensor, roots: Tensor) -> Tensor:
        """[B, 1, N] draft logits for the children of the roots. states: [B, H]. roots: [B]."""

    @property
    def lengths(self) -> list[int]:
        return self.observed.lengths

    @torch.no_grad()
    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        known = self.observed.known()
        if all(state is None for state in known):
            return [None] * len(known)
        logits = self.start(stacked(known), roots)
        return [None if state is None else row for row, state in zip(logits, known, strict=True)]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.observed.observe(features)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.observed.rewind(lengths)
