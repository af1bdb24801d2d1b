"""Prompt lookup: drafts what followed the text's last tokens where they first stood in it (Saxena 2023).

The draft is that of transformers' `PromptLookupCandidateGenerator`: of all n-grams that end the text it takes the
longest one that a token follows elsewhere in the text, and there the first place. With n-grams of at most two tokens
and three draft tokens, a b first stood before slot 2, so c d a are drafted:

    slot     0 1 2 3 4 5 6 7 8
    text     a b c d a b e a b
             └─┘ └───┘     └─┘
           first draft     the last two

transformers ends a draft before an end-of-sequence token, and before a token that a logits processor forbids. Here
the draft goes on: verification rejects what the target forbids, and ends the text where it ends.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.matches import find_longest_match
from treespec.draft.lookup.one_hot import TextDrafter
from treespec.draft.registry import PromptLookupOptions
from treespec.draft.spec import DrafterSpec
from treespec.model.target import Target


@final
@dataclass(frozen=True)
class PromptLookup(TextDrafter):
    """Drafts a chain from the sequence itself. options: transformers' two, by their names there."""

    options: PromptLookupOptions

    def draft(self, text: np.ndarray) -> Guess:
        _, slots = find_longest_match(text, text, self.options.max_matching_ngram_size)
        if not len(slots):
            return Guess()
        first = slots[0]
        return Guess.chain(text[first : first + self.options.prompt_lookup_num_tokens].tolist())


def load_prompt_lookup(spec: DrafterSpec, target: Target) -> TextDrafter:
    """Loads the drafter of `--drafter prompt-lookup` or `prompt-lookup:prompt_lookup_num_tokens=5`."""
    return PromptLookup(spec.options)
