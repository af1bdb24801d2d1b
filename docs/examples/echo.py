"""A drafter of your own: what followed the last token where it last stood before."""

import sys

import numpy as np

from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.one_hot import TextDrafter


class Echo(TextDrafter):
    def __init__(self, tokens=8):
        self.tokens = tokens

    def draft(self, text):  # text: [T] token ids, the last one is the tree's root
        before = np.flatnonzero(text[:-1] == text[-1])
        end = before[-1] + 1 if len(before) else len(text)
        return Guess.chain(text[end : end + self.tokens].tolist())


if __name__ == "__main__":
    from treespec import Spec, load

    spec = Spec(load(sys.argv[1]).target, Echo(8), verifier="topk")
    print(spec.generate("Once upon a time", max_new_tokens=32))
