"""Where the last tokens of a text stood before, in one long text or in many short ones.

Every n-gram of a few orders leads to its latest place, and every place to the one before with the
same n-gram. In the text `a b c a b` the chain of `a b` leads from position 4 to 1:

    position    0  1  2  3  4         last     {a b: 4, b c: 2, c a: 3}
    token       a  b  c  a  b         before   -  -  -  -  1

A search follows the chain of the longest order that the context's end has, and compares backwards
from there. So the index answers what a suffix tree of bounded depth would, in some 200 bytes a token.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final

ORDERS = (8, 4, 2, 1)  # lengths of the n-grams, longest first
NEWEST = 64  # places that a search looks at, the latest ones
END = -1  # stands behind each of several texts


class Place(NamedTuple):
    """Tokens [..., next) equal the end of a context. tokens: of the whole index."""

    length: int
    tokens: Sequence[int]
    next: int


@final
class SuffixIndex:
    """Adding a token takes some microseconds; a search looks at NEWEST places of each order at most."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._start = 0  # of the text that grows
        self._last: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)
        self._before = tuple(array("q") for _ in ORDERS)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The last text grows by these tokens."""
        own = self.tokens
        chains = list(zip(ORDERS, self._last, self._before, strict=True))
        for token in tokens:
            own.append(token)
            end = len(own)
            for order, last, before in chains:
                if end - self._start < order:
                    before.append(-1)
                    continue
                gram = hash(tuple(own[end - order :]))
                before.append(last.get(gram, -1))
                last[gram] = end - 1

    def end_text(self) -> None:
        """The last text ends: no n-gram crosses its end."""
        self.tokens.append(END)
        for before in self._before:
            before.append(-1)
        self._start = len(self.tokens)

    def places(self, context: Sequence[int], longest: int, order: int) -> list[Place]:
        """The latest places of the context's last `order` tokens that a token follows.

        context: its end is looked for; it may be the index's own text. longest: the most tokens to
        compare. order: one of ORDERS. Two n-grams of one hash are taken for one: a wrong place costs
        a wrong draft, no more.
        """
        if order > min(len(context), longest):
            return []
        row, found, tokens = ORDERS.index(order), list[Place](), self.tokens
        at = self._last[row].get(hash(tuple(context[-order:])), -1)
        before, most = self._before[row], min(len(context), longest)
        while at >= 0 and len(found) < NEWEST:
            if at + 1 < len(tokens) and tokens[at + 1] != END:
                length = order
                while length < most and at >= length:
                    if tokens[at - length] != context[-1 - length]:
                        break
                    length += 1
                found.append(Place(length, tokens, at + 1))
            at = before[at]
        return found


def longest_match(
    indexes: Sequence[SuffixIndex], context: Sequence[int], longest: int, count: int
) -> list[Place]:
    """The places of the context's longest suffix that occurs `count` times in the indexes together.

    Longer matches among them keep their length. []: no suffix does.
    """
    for order in ORDERS:
        found = [place for index in indexes for place in index.places(context, longest, order)]
        if len(found) >= count:
            least = sorted((place.length for place in found), reverse=True)[count - 1]
            return [place for place in found if place.length >= least]
    return []
