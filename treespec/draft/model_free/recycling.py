"""Draft what the target held likely after the same tokens before.

Token Recycling (Luo et al. 2024, 2408.08696, section 3). The target scores every node of a tree; of
each node's token it keeps the TOPK most likely tokens after its last node. Until a token is scored,
those that followed it in the sequence stand in, the latest first, so a prompt counts too. Each tree has
the shape SHAPE, as far as tokens are known: the child of rank r carries the r-th token after its
parent's. Five nodes:

    after a: b c      root a ─┬─ b ─┬─ d
    after b: d e              │     └─ e
                              └─ c
"""

from itertools import pairwise
from typing import final

import numpy as np

from treespec.draft.drafters import DrafterSpec
from treespec.draft.model_free.guess import Guess
from treespec.draft.model_free.one_hot import TextDrafter
from treespec.model.target import Target, TreeOutput
from treespec.shaping.sampling import largest
from treespec.trees.most_likely import most_likely
from treespec.verify.walk import Judging

TOPK, NODES = 8, 80  # as in the paper
DEPTH = 6
RATES = (0.5, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.01)  # Pr(a child is accepted), by its rank
SHAPE = most_likely([RATES] * DEPTH, NODES).paths[1:]


@final
class Recycling(TextDrafter):
    """The most likely tokens after each token of one sequence."""

    def __init__(self) -> None:
        self.after: dict[int, list[int]] = {}
        self.root, self.read = -1, 1  # the tree's, and how many tokens of the sequence are read

    def draft(self, text: np.ndarray) -> Guess:
        for token, following in pairwise(text[self.read - 1 :].tolist()):
            known = self.after.setdefault(token, [])
            if following not in known:
                self.after[token] = [following, *known][:TOPK]
        self.root, self.read = int(text[-1]), len(text)
        number: dict[tuple[int, ...], int] = {(): 0}
        tokens, parents = [self.root], list[int]()
        for path in SHAPE:
            parent = number.get(path[:-1])
            if parent is None or path[-1] >= len(self.after.get(tokens[parent], ())):
                continue
            number[path] = len(tokens)
            tokens.append(self.after[tokens[parent]][path[-1]])
            parents.append(parent)
        return Guess(tokens[1:], parents)

    def update(self, guess: Guess, accepted: int, out: TreeOutput) -> Judging:
        best = (yield largest(out.logits, min(TOPK, out.logits.shape[1]))[1]).tolist()
        self.after.update(zip((self.root, *guess.tokens), best, strict=True))


def load_recycling(spec: DrafterSpec, target: Target) -> TextDrafter:
    return Recycling()
