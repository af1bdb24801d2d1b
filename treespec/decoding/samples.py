"""Several answers to one prompt share its prefill."""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from treespec.draft.drafter import Drafter
from treespec.model.cache import TreeCache


@final
class Samples:
    """The prompt's keys and values and its features, from the first text until the last has begun.

    left: texts of the prompt that have not begun. Each copies the keys and values; its drafter
    observes the features anew.
    """

    def __init__(self, count: int) -> None:
        self.left = count
        self.cache: TreeCache | None = None
        self.observed: list[
            tuple[Tensor, Tensor]
        ] = []  # features and tokens, as they were observed

    def begin(self, cache: TreeCache, observed: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One text more has begun. cache: its own, with the prompt alone. observed: features and
        tokens of the prompt, from the text that prefilled it.
        """
        self.left -= 1
        if self.left <= 0:
            self.cache, self.observed = None, []
        elif self.cache is None:
            self.cache, self.observed = cache.alone(0), list(observed)

    def fill(self, drafter: Drafter | None) -> TreeCache:
        """Bring the prompt into a new text's drafter. Returns a cache that holds it."""
        assert self.cache
        if drafter:
            for features, tokens in self.observed:
                drafter.observe([features], [tokens])
        return self.cache.alone(0)
