"""Suffix arrays: where in a long text a few tokens stand, by binary search."""

from bisect import bisect_left, bisect_right

import numpy as np


def suffix_array(tokens: np.ndarray, order: int) -> np.ndarray:
    """[T] uint32: the places of a text, sorted by the `order` tokens that begin there; the end of the text is lowest.

    tokens: [T] whole numbers. Ranks by twice as many tokens are made of pairs of ranks (Manber and Myers 1993) until
    `order` is reached: searches of no more tokens need no finer order.
    """
    places, rank = ranked(tokens)
    known = 1
    while known < order:
        ahead = np.pad(rank[known:], (0, min(known, len(rank))))
        places, rank = ranked(rank * (len(tokens) + 1) + ahead)
        known *= 2
    return places.astype(np.uint32)


def ranked(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T] the places of keys in ascending order, and [T] int64 the rank of each, from 1, equal ones alike."""
    places = keys.argsort()
    ordered = keys[places]
    rank = np.empty(len(keys), dtype=np.int64)
    rank[places] = np.cumsum(np.concatenate([[1], ordered[1:] != ordered[:-1]])[: len(keys)])
    return places, rank


def places_of(tokens: np.ndarray, suffixes: np.ndarray, pattern: list[int]) -> tuple[int, int]:
    """Which stretch of the suffix array begins with a pattern of at most its order: first, and the one behind the last.

    tokens, suffixes: [T].
    """

    def beginning(place: np.integer) -> list[int]:
        return tokens[int(place) : int(place) + len(pattern)].tolist()

    first = bisect_left(suffixes, pattern, key=beginning)
    return first, bisect_right(suffixes, pattern, lo=first, key=beginning)


def longest_suffix(
    tokens: np.ndarray, suffixes: np.ndarray, text: list[int], shortest: int, longest: int
) -> tuple[int, int, int]:
    """How many last tokens of a text stand in `tokens`, 0 for fewer than `shortest`, and their `places_of`.

    Where a suffix stands, shorter ones do, so that its length is searched for by halves too.
    """
    length, first, last = shortest - 1, 0, 0
    most = min(longest, len(text))
    while length < most:
        middle = (length + most + 1) // 2
        found = places_of(tokens, suffixes, text[-middle:])
        if found[0] < found[1]:
            length, (first, last) = middle, found
        else:
            most = middle - 1
    return (length if first < last else 0), first, last
