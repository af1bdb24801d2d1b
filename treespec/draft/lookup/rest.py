"""REST: drafts the most frequent continuations of the text's last tokens in a datastore (He et al. 2024, 2311.08252).

The longest suffix of the text that the datastore holds is looked up, of 16 to 2 tokens. The continuations of its
occurrences make a trie, and the 64 nodes that most of them go through are the draft tree. Two differences from the
authors' program: of more occurrences than `matches` it takes evenly spaced ones, where theirs takes the first 5,000
in the order of what follows; and `--verifier auto` drafts only the nodes that should be worth their time.
"""

from dataclasses import dataclass, replace
from typing import Self, final

import numpy as np

from treespec.draft.lookup.datastore import Datastore, open_datastore
from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.matches import merge_continuations
from treespec.draft.lookup.one_hot import TextDrafter
from treespec.draft.lookup.suffix_cache import hash_vocabulary
from treespec.draft.registry import RestOptions
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target

SHORTEST_MATCH = 2  # tokens; what follows a single token is left to no draft


@final
@dataclass(frozen=True)
class Rest(TextDrafter):
    """Drafts for any number of sequences, which share the datastore."""

    store: Datastore
    options: RestOptions

    def new(self) -> Self:
        return self

    def draft(self, text: np.ndarray) -> Guess:
        options = self.options
        length, slots = self.store.find_longest_match(text, options.longest)
        if length < SHORTEST_MATCH:
            return Guess()
        if len(slots) > options.matches:
            chosen = np.linspace(0, len(slots) - 1, options.matches).round().astype(np.int64)
            slots = slots[chosen]
        continuations = self.store.list_continuations(slots, options.tokens)
        guess = merge_continuations(continuations, options.nodes, length, lambda matched: 1.0, 0.0)
        return estimate_probabilities(guess, len(continuations))


def estimate_probabilities(guess: Guess, occurrences: int) -> Guess:
    """Estimates Pr(a node is accepted | its parent is), by which `auto` chooses nodes.

    Of a parent's n continuations c go on to the node: the estimate is c / (n + 1), because a continuation that the
    datastore lacks is as likely as one that it holds once (PPM's method A, Cleary and Witten 1984).

    guess: with the shares c / n as probabilities. occurrences: the root's n.
    """
    assert guess.probabilities is not None
    counts = guess.compute_reach(guess.probabilities) * occurrences  # [N]
    parent_counts = counts[list(guess.parents)]  # [N - 1]
    return replace(guess, probabilities=np.append(1.0, counts[1:] / (parent_counts + 1)))


def load_rest(spec: DrafterSpec, target: Target) -> TextDrafter:
    """Loads the drafter of `--drafter rest:FOLDER`. Raises InputError as `open_datastore` does."""
    tokenizer = hash_vocabulary(target.tokenizer, target.vocab_size)
    return Rest(open_datastore(spec.place, tokenizer, target.vocab_size), spec.options)
