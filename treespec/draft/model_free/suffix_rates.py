"""How often guesses by counts were right in one text, by the length of the match."""

from typing import final

from treespec.draft.model_free.suffix_tree import Guess

# (longest match, Pr(one of the children is right)) before anything is known; the last is for all more
BANDS = ((1, 0.2), (3, 0.4), (7, 0.6), (15, 0.75), (31, 0.85), (32, 0.9))
WEIGHT = 3.0  # guesses that the first rates count for
FORGET = 0.98  # weight of what was learned before, a guess


@final
class Rates:
    """Learns from the text alone, whether or not a guess was drafted and accepted."""

    def __init__(self) -> None:
        self._promised = [WEIGHT for _ in BANDS]
        self._kept = [WEIGHT * rate for _, rate in BANDS]
        self._last, self._at = Guess(), 0

    @property
    def by_length(self) -> list[float]:
        """The rate for matches of 0, 1, … tokens; the last one is for all longer ones."""
        rates, first = [0.0], 1
        for (last, _), promised, kept in zip(BANDS, self._promised, self._kept, strict=True):
            rates += [min(kept / promised, 0.98)] * (last + 1 - first)
            first = last + 1
        return rates

    def guessed(self, guess: Guess, at: int) -> None:
        """A guess of what follows the text's first `at` tokens."""
        self._last, self._at = guess, at

    def learn(self, text: list[int]) -> None:
        """Compare the last guess with the text, which has grown."""
        # 1. Children by node.
        last, self._last = self._last, Guess()
        child_of: dict[tuple[int, int], int] = {}
        shares: dict[int, float] = {}
        links = zip(last.parents, last.tokens, last.shares, strict=True)
        for node, (parent, token, share) in enumerate(links, start=1):
            child_of[parent, token] = node
            shares[parent] = shares.get(parent, 0.0) + share

        # 2. Along the text, as far as the guess goes.
        node = 0
        for depth, token in enumerate(text[self._at :]):
            if node not in shares:
                return
            band = next(
                (row for row, (most, _) in enumerate(BANDS) if last.length + depth <= most),
                len(BANDS) - 1,
            )
            below = child_of.get((node, token))
            self._promised[band] = FORGET * self._promised[band] + shares[node]
            self._kept[band] = FORGET * self._kept[band] + (below is not None)
            if below is None:
                return
            node = below
