"""The oracle: drafts the answer that the target is known to give, so that every draft token is accepted.

`treespec eval` makes the answer first, by one-token decoding with the same seed, and replays it as a chain. Nothing
drafts better at that depth, so the oracle shows what drafting could bring on a machine, with any head. With a depth of
three, and the answer a b c d e after a prompt that ends with r:

    cycle 1     r ─── a ─── b ─── c         accepts a b c, and d follows
    cycle 2     d ─── e                     the answer ends

Above temperature 0 the verifiers `auto` and `gumbel` write the same text again, as their noise is the seed's.
"""

from collections.abc import Sequence
from typing import Self, final

import numpy as np

from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.one_hot import TextDrafter
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.model.target import Target


@final
class Oracle(TextDrafter):
    """Replays texts that `remember` was given. All drafters that `new` returns share them.

    Attributes:
        depth: draft tokens of a cycle.
        texts: prompts with their answers.
    """

    def __init__(self, depth: int, texts: list[np.ndarray] | None = None) -> None:
        self.depth = depth
        self.texts: list[np.ndarray] = []
        if texts is not None:
            self.texts = texts

    def new(self) -> Self:
        return type(self)(self.depth, self.texts)

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        self.texts.append(np.array(completion, dtype=np.int64))

    def draft(self, text: np.ndarray) -> Guess:
        """Returns what follows in the known text that begins so; nothing where rounding chose another token."""
        if not self.texts:
            raise InputError(
                "the drafter oracle has no answer to replay: `treespec eval` gives it one"
            )
        length = len(text)
        for known_text in reversed(self.texts):
            if np.array_equal(known_text[:length], text):
                return Guess.chain(known_text[length : length + self.depth].tolist())
        return Guess()


def load_oracle(spec: DrafterSpec, target: Target) -> TextDrafter:
    """Loads the drafter of `--drafter oracle:5`."""
    return Oracle(spec.options.depth)
