"""Draft laws without the tokens that are given already."""

import copy
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from treespec.shaping.law import Law, Path
from treespec.trees.tree import TokenTree


@final
class Apart:
    """A shaper of draft logits alone: a given child of a node is not drafted there once more.

    The draws then come from q without these tokens, renormalised, and that is the q that the
    verifier gets. given: by path, the tokens of its given children.
    """

    def __init__(self, given: Mapping[Path, Sequence[int]]) -> None:
        self.given = given

    def begin(self, prompt: Sequence[int]) -> "Apart":
        return self

    def shape(
        self, answer: Sequence[int], paths: Sequence[Sequence[int]], logits: Tensor
    ) -> Tensor:
        taken = [self.given.get(tuple(path), ()) for path in paths]
        rows = [row for row, tokens in enumerate(taken) for _ in tokens]
        if not rows:
            return logits
        columns = [token for tokens in taken for token in tokens]
        places = (torch.tensor(rows), torch.tensor(columns))
        own = tuple(place.to(logits.device) for place in places)
        return logits.index_put(own, logits.new_tensor(-torch.inf))


def apart(law: Law, given: TokenTree, above: Path) -> Law:
    """A text's law for its drafts, without the given tokens. above: the path of their root."""
    paths: list[Path] = [above]
    children: dict[Path, list[int]] = {}
    links = zip(given.tokens.tolist()[1:], given.parents.tolist()[1:], strict=True)
    for token, parent in links:
        children.setdefault(paths[parent], []).append(token)
        paths.append((*paths[parent], token))
    own = copy.copy(law)  # shares the answer and what is heard
    own.shapers = (*law.shapers, Apart(children))
    return own
