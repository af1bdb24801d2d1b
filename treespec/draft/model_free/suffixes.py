"""Suffix arrays: where in a long text a few tokens stand, by binary search."""

from bisect import bisect_left, bisect_right

import numpy as np


def suffix_array(tokens: np.ndarray, order: int) -> np.ndarray:
    """[T] uint32: positions of a text, sorted by the next `order` tokens; its end sorts first.

    tokens: [T] whole numbers. Each round sorts pairs of ranks, which doubles the number of tokens
    compared (Manber and Myers 1993), up to `order`. Searches for at most `order` tokens need no
    finer order.
    """
    places, rank = ranked(tokens)
    known = 1
    while known < order:
        ahead = np.pad(rank[known:], (0, min(known, len(rank))))
        places, rank = ranked(rank * (len(tokens) + 1) + ahead)
        known *= 2
    return places.astype(np.uint32)


def ranked(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[T] positions of the keys in ascending order, and [T] int64 ranks from 1.

    Equal keys have equal ranks.
    """
    places = keys.argsort()
    ordered = keys[places]
    rank = np.empty(len(keys), dtype=np.int64)
    rank[places] = np.cumsum(np.concatenate([[1], ordered[1:] != ordered[:-1]])[: len(keys)])
    return places, rank


def places_of(tokens: np.ndarray, suffixes: np.ndarray, pattern: list[int]) -> tuple[int, int]:
    """The range [first, end) of the suffix array whose suffixes begin with the pattern.

    tokens, suffixes: [T]. pattern: at most `order` tokens.
    """

    def beginning(place: np.integer) -> list[int]:
        return tokens[int(place) : int(place) + len(pattern)].tolist()

    first = bisect_left(suffixes, pattern, key=beginning)
    return first, bisect_right(suffixes, pattern, lo=first, key=beginning)


def longest_suffix(
    tokens: np.ndarray, suffixes: np.ndarray, text: list[int], shortest: int, longest: int
) -> tuple[int, int, int]:
    """Length of the text's longest suffix that occurs in `tokens`, and its range by `places_of`.

    The length is 0 if it is below `shortest`. If a suffix occurs, shorter ones do, so a binary
    search finds the length.
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
