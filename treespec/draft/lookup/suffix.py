"""Looks up the sequence's last tokens and drafts what followed them.

Suffix decoding (Oliaro et al. 2024, 2411.04975) searches the sequence and all completions so far for the longest
suffix of the sequence. The longer the match, the larger the draft. Prompt lookup (Saxena 2023), which
transformers has as `prompt_lookup_num_tokens`, is a special case.
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

NO_GUESS = Guess(probabilities=np.ones(1))
NEWEST_MATCHES = 64  # occurrences of a suffix to draft from, the latest ones


# Upper bounds of five bands of match length; a sixth band has no bound. Then Pr(one of the children is right) in
# each band before any feedback.
MATCH_LENGTH_BANDS = (1, 3, 7, 15, 31)
PRIOR_MATCH_RATES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.9)
PRIOR_GUESSES = 3.0  # weight of the prior rates, in guesses
MATCH_RATE_DECAY = 0.98  # factor of the weight of earlier guesses, for each guess
MAX_MATCH_RATE = 0.98


@final
class Suffix(TextDrafter):
    """Drafts for one sequence. Sequences with one cache name share the completions that have ended.

    It compares its guesses with the tokens that the sequence gets, whether or not they were drafted, and so
    learns how often they are right.

    Attributes:
        seen: tokens of the sequence at the last guess.
        last: the last guess.
        least_scores: by the number of draft tokens: the expected accepted ones that a guess must exceed; (): any
            guess pays.
        predicted, correct: [6] decayed counts of guesses, and of right ones, by band of match length.
    """

    def __init__(self, options: SuffixOptions, caches: SuffixCaches) -> None:
        self.options = options
        self.caches = caches
        self.cache: SuffixCache | None = None  # None: it drafts only from its sequence
        self.seen = 0
        self.last = Guess()
        self.least_scores: Sequence[float] = ()
        self.predicted = [PRIOR_GUESSES for _ in PRIOR_MATCH_RATES]
        self.correct = [PRIOR_GUESSES * rate for rate in PRIOR_MATCH_RATES]

    def new(self) -> "Suffix":
        return Suffix(self.options, self.caches)

    def set_least_scores(self, scores: Sequence[float]) -> None:
        self.least_scores = scores

    def enter(self, cache: str | None) -> None:
        self.cache = None
        if cache is not None:
            self.cache = self.caches.get_cache(cache)

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        self.caches.add(cache, completion)

    def draft(self, text: np.ndarray) -> Guess:
        """Returns the guess from the sequence or from the cache, whichever has the higher score.

        text: [T] int64, which begins with the text of the previous call.
        """
        self._learn(text[self.seen :].tolist())
        self.seen = len(text)
        self.last = self._guess(text, text)
        if self.cache and len(self.cache.tokens):
            of_cache = self._guess(self.cache.tokens, text)
            if of_cache.score > self.last.score:
                self.last = of_cache
        return self.last

    def _guess(self, tokens: np.ndarray, text: np.ndarray) -> Guess:
        options = self.options
        length, match_ends = find_longest_match(tokens, text, options.longest)
        nodes = min(options.nodes, options.growth * length)
        if not length or not self._can_pay(length, nodes):
            return NO_GUESS
        newest_ends = match_ends[::-1][:NEWEST_MATCHES].tolist()
        continuations = [tokens[end : end + nodes].tolist() for end in newest_ends]
        return merge_continuations(
            continuations, nodes, length, self.predict_match_rate, options.percent / 100
        )

    def _can_pay(self, length: int, nodes: int) -> bool:
        """Whether a guess can be worth its time: at best it is a chain. length: of the match. nodes: of the guess.

        predicted rates      .2    .2 · .4       after a match of one token, of two tokens
        expected accepted    .2    .2 + .08      of a guess of one token, of two
        least scores         .19   .31           the guess of one token can pay
        """
        if not self.least_scores:
            return True
        reach = 1.0
        score = 0.0
        for depth, least_score in enumerate(self.least_scores[1 : 1 + nodes]):
            reach *= self.predict_match_rate(length + depth)
            score += reach
            if score > least_score:
                return True
        return False

    def predict_match_rate(self, length: int) -> float:
        """Returns Pr(one of the children is right) after a match of `length` tokens."""
        band = bisect_left(MATCH_LENGTH_BANDS, length)
        return min(self.correct[band] / self.predicted[band], MAX_MATCH_RATE)

    def _learn(self, new: Sequence[int]) -> None:
        """Compares the last guess with the new tokens, level by level, until they leave it."""
        if not self.last.tokens:
            return
        children: dict[int | None, dict[int, tuple[int, float]]] = {}
        links = zip(self.last.parents, self.last.tokens, self.last.shares, strict=True)
        for child, (parent, token, share) in enumerate(links, start=1):
            children.setdefault(parent, {})[token] = child, share
        node: int | None = 0
        for depth, token in enumerate(new):
            if node not in children:
                return
            band = bisect_left(MATCH_LENGTH_BANDS, self.last.length + depth)
            node_children = children[node]
            drafted_share = sum(share for _, share in node_children.values())
            self.predicted[band] = MATCH_RATE_DECAY * self.predicted[band] + drafted_share
            self.correct[band] = MATCH_RATE_DECAY * self.correct[band] + (token in node_children)
            node, _ = node_children.get(token, (None, 0.0))


def load_suffix(spec: DrafterSpec, target: Target) -> TextDrafter:
    """Loads the drafter of `--drafter suffix` or `suffix:FOLDER,tokens=5000`. Raises InputError."""
    root = None
    vocabulary = ""
    if spec.place:
        root = Path(spec.place).expanduser()
        vocabulary = hash_vocabulary(target.tokenizer, target.vocab_size)  # the files hold it
    caches = SuffixCaches(spec.options.tokens, root, vocabulary, target.vocab_size)
    return Suffix(spec.options, caches)
