"""State of texts that are decoded together: one row a text. Rows come and go."""

from collections.abc import Sequence
from itertools import chain
from typing import Self


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
