"""State of texts that are decoded together: one row a text. Rows come and go."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import Self

from torch import Tensor, nn


class PerText:
    """State of B texts. `per_text` names the fields that hold it.

    Such a field is a list with one entry a text, or an object with a `join` and a `select` of its
    own: a cache, say.
    """

    per_text: tuple[str, ...] = ()

    def join(self, others: Sequence[Self]) -> None:
        """Append the texts of others."""
        for name in self.per_text:
            own, theirs = getattr(self, name), [getattr(other, name) for other in others]
            if isinstance(own, list):
                setattr(self, name, [*own, *chain.from_iterable(theirs)])
            else:
                own.join(theirs)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the texts in these rows, in this order."""
        for name in self.per_text:
            own = getattr(self, name)
            if isinstance(own, list):
                setattr(self, name, [own[row] for row in rows])
            else:
                own.select(rows)


class Observer(PerText, ABC):
    """Observes B texts, one at first, and drafts for them."""

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it observes as features; () is the last hidden state."""

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Observed positions, by text."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The draft models that it computes with besides the target."""
        return ()

    @abstractmethod
    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        """Each text grew by n positions: their features [n, H], and their tokens and one more,
        [n + 1].
        """

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths` observed positions of each text; other texts may follow them."""

    @abstractmethod
    def new(self) -> Self:
        """Another one with the same models and options and one text, of which nothing is observed."""
