"""Drafters without a model: they hand over trees of given tokens, found in the text, in a datastore or by guesses.

The children are a function of the text and of draws made before, so their law is one-hot and the plan is that of
`topk`: sample p and see whether the token is a child. No other scheme's q describes them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self, final

import numpy as np
import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.errors import InputError
from treespec.sampling import SamplingParams
from treespec.target import TreeOutput
from treespec.trees.tree import Rows, TokenTree
from treespec.verify.scheme import Scheme


class TextDrafter(Protocol):
    """Drafts for one text."""

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        """text: [T] int64, the root last. The tree, without laws, is on the host."""
        ...

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """So many drafted tokens of the tree were accepted. out: what the target said of it."""
        ...

    def new(self) -> Self:
        """Another of its kind, which knows nothing of its text."""
        ...


def check_given(name: str, scheme: Scheme, tree: object) -> None:
    """The pairing rule of trees of given tokens. Raises InputError for a scheme that needs draft laws, and for a tree.

    At temperature 0 all schemes agree; which one is refused does not hang on it.
    """
    if not scheme.deterministic:
        raise InputError(
            f"{name} hands over given tokens, which have no draft law for verifier {scheme.name}: take --verifier topk"
        )
    if tree is not None:
        raise InputError(f"{name} makes its own tree: leave out --tree, and see --drafter {name}:… for its options")


@final
class GivenDrafter:
    """A `TextDrafter` for each of B texts; all that was observed of a text is kept. name: as `--drafter` has it."""

    taps: tuple[int, ...] = ()
    forward_seconds = 0.0

    def __init__(self, drafter: TextDrafter, name: str) -> None:
        self.name, self.drafters = name, [drafter]
        self.texts = [np.empty(0, dtype=np.int64)]  # of each the observed tokens [T]

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def draft_trees(
        self, roots: Tensor, params: SamplingParams, generators: Sequence[torch.Generator], cache: TreeCache
    ) -> list[TokenTree]:
        texts = zip(self.drafters, self.texts, roots.tolist(), generators, strict=True)
        trees = [drafter.draft(np.append(text, root), generator) for drafter, text, root, generator in texts]
        return [moved(tree, roots.device) for tree in trees]

    def settle(self, accepted: Sequence[int], outs: Sequence[TreeOutput]) -> None:
        for drafter, number, out in zip(self.drafters, accepted, outs, strict=True):
            drafter.settle(number, out)

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        new = [known[:-1].cpu().numpy() for known in tokens]
        self.texts = [np.concatenate(pair) for pair in zip(self.texts, new, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]
        self.drafters = [drafter.new() for drafter in self.drafters]

    def new(self) -> "GivenDrafter":
        return GivenDrafter(self.drafters[0].new(), self.name)

    def join(self, others: Sequence["GivenDrafter"]) -> None:
        self.texts = self.texts + [text for other in others for text in other.texts]
        self.drafters = self.drafters + [drafter for other in others for drafter in other.drafters]

    def select(self, rows: Sequence[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.drafters = [self.drafters[row] for row in rows]


def moved(tree: TokenTree, device: torch.device) -> TokenTree:
    """A tree without laws on another device."""
    rows = tree.rows
    if rows:
        rows = Rows(rows.tokens.to(device), rows.depth.to(device), rows.mask.to(device), rows.asked)
    names = ("tokens", "parents", "depth", "ancestors")
    return replace(tree, rows=rows, **{name: getattr(tree, name).to(device) for name in names})
