"""Look the sequence's last tokens up, and draft what followed them.

Suffix decoding (Oliaro et al. 2024, 2411.04975) looks in the sequence and in all completions so far, for
the longest suffix that occurs there; the longer the match, the larger the draft. Prompt lookup (Saxena 2023),
which transformers has as `prompt_lookup_num_tokens`, is a case of it.
"""

from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import final

import numpy as np

from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.matches import find_longest_match, merge_continuations
from treespec.draft.lookup.one_hot import TextDrafter
from treespec.draft.lookup.suffix_cache import SuffixCache, SuffixCaches, hash_vocabulary
from treespec.draft.registry import SuffixOptions
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target

NEWEST_MATCHES = 64  # places of a match that `suffix` drafts from, the latest ones


# Matches of up to so many tokens, and of more; Pr(one of the children is right) before any feedback.
MATCH_LENGTH_BANDS = (1, 3, 7, 15, 31)
PRIOR_MATCH_RATES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.9)
PRIOR_GUESSES = 3.0  # guesses that the first rates count for
MATCH_RATE_DECAY = 0.98  # weight of what was learned before, a guess
MAX_MATCH_RATE = 0.98  # the highest rate


@final
class Suffix(TextDrafter):
    """Drafts for one sequence. Those of one cache name share its completions, once these have ended.

    It learns how often its guesses are right from the sequence alone, whether or not they were drafted
    and accepted.
    promised, kept: [6] guesses by the length of the match, and those that were right.
    """

    def __init__(self, options: SuffixOptions, caches: SuffixCaches) -> None:
        self.options = options
        self.caches = caches
        self.cache: SuffixCache | None = None  # None: it drafts from its own sequence alone
        self.seen = 0  # tokens of the text of the last guess
        self.last = Guess()
        self.predicted = [PRIOR_GUESSES for _ in PRIOR_MATCH_RATES]
        self.correct = [PRIOR_GUESSES * rate for rate in PRIOR_MATCH_RATES]

    def new(self) -> "Suffix":
        return Suffix(self.options, self.caches)

    def enter(self, cache: str | None) -> None:
        self.cache = None
        if cache is not None:
            self.cache = self.caches.get_cache(cache)

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        self.caches.get_cache(cache).add(completion)

    def draft(self, text: np.ndarray) -> Guess:
        """text: [T], which begins with the text of the call before.

        The guess of the sequence itself, or that of the cache: the more promising one.
        """
        self._learn(text[self.seen :].tolist())
        self.seen = len(text)
        self.last = self._guess(text, text)
        if self.cache:
            of_cache = self._guess(self.cache.tokens, text)
            if of_cache.score > self.last.score:
                self.last = of_cache
        return self.last

    def _guess(self, tokens: np.ndarray, text: np.ndarray) -> Guess:
        by = self.options
        length, places = find_longest_match(tokens, text, by.longest)
        latest = places[::-1][:NEWEST_MATCHES].tolist()
        following = [tokens[place : place + by.nodes].tolist() for place in latest]
        nodes = min(by.nodes, by.growth * length)
        return merge_continuations(
            following, nodes, length, self.predict_match_rate, by.percent / 100
        )

    def predict_match_rate(self, length: int) -> float:
        """Pr(one of the children is right) after a match of `length` tokens."""
        band = bisect_left(MATCH_LENGTH_BANDS, length)
        return min(self.correct[band] / self.predicted[band], MAX_MATCH_RATE)

    def _learn(self, new: Sequence[int]) -> None:
        """Compare the last guess with the new tokens, as far as it goes."""
        children: dict[int | None, dict[int, tuple[int, float]]] = {}
        links = zip(self.last.parents, self.last.tokens, self.last.shares, strict=True)
        for child, (parent, token, share) in enumerate(links, start=1):
            children.setdefault(parent, {})[token] = child, share
        node: int | None = 0
        for depth, token in enumerate(new):
            if node not in children:
                return
            band = bisect_left(MATCH_LENGTH_BANDS, self.last.length + depth)
            below = children[node]
            promised = sum(share for _, share in below.values())
            self.predicted[band] = MATCH_RATE_DECAY * self.predicted[band] + promised
            self.correct[band] = MATCH_RATE_DECAY * self.correct[band] + (token in below)
            node, _ = below.get(token, (None, 0.0))


def load_suffix(spec: DrafterSpec, target: Target) -> TextDrafter:
    """`--drafter suffix` and `suffix:FOLDER,tokens=5000`. Raises InputError."""
    root = None
    if spec.place:
        root = Path(spec.place).expanduser()
    vocabulary = hash_vocabulary(target.tokenizer, target.vocab_size)
    caches = SuffixCaches(spec.options.tokens, root, vocabulary, target.vocab_size)
    return Suffix(spec.options, caches)
