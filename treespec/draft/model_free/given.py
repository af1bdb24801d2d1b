"""Drafters without a model: their tokens come from the text, a datastore or guesses.

The children are a function of the text and of earlier draws, so their law is one-hot. The plan is
that of `topk`: sample p and see whether the token is a child. No other scheme's q describes them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, Self, TypeGuard, final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.cost.model import CostBy
from treespec.draft.cost.running import CostModels
from treespec.draft.drafter import Drafter
from treespec.draft.model_free.budget import part, rests
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.law import Law
from treespec.trees.tree import Rows, TokenTree, hung_below, root_only


class TextDrafter(Protocol):
    """Drafts for one text."""

    @property
    def widest(self) -> int:
        """The most nodes and rows of a forward with extra rows; 0: it adds no rows."""
        ...

    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        """The tree below the last token, the root: on the host, without laws. text: [T] int64."""
        ...

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """Feedback after a cycle: the number of accepted draft tokens, and the target's output on
        the tree.
        """
        ...

    def new(self) -> Self:
        """Another drafter with the same options, for a new text."""
        ...


class Remembering(TextDrafter, Protocol):
    """Drafts from earlier answers, too, and estimates how likely its drafts are.

    It says so by an attribute `remembers`; drafters without one do not.
    """

    remembers: ClassVar[bool] = True

    @property
    def chances(self) -> np.ndarray:
        """[N] Pr(a node of the latest tree is accepted | its parent is)."""
        ...

    def enter(self, memory: str | None) -> None:
        """A text begins. memory: what it may draft from, beside itself; None: nothing."""
        ...

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        """An answer has ended, of any text."""
        ...


def remembers(drafter: TextDrafter) -> TypeGuard[Remembering]:
    """Whether it is a `Remembering` drafter, in the type checker's terms."""
    return getattr(drafter, "remembers", False)


@final
class GivenDrafter(Drafter):
    """A `TextDrafter` and all observed tokens for each of B texts; one text at first.

    name: its kind, as `--drafter` takes it. times: with them it drafts only the part of a tree that
    pays (`treespec.draft.model_free.budget`); None: whole trees.
    """

    per_text = ("texts", "drafters", "paces", "resting")
    taps: tuple[int, ...] = ()
    given = True

    def __init__(self, drafter: TextDrafter, name: str, times: CostBy | None = None) -> None:
        self.name, self.drafters, self.times = name, [drafter], times
        self.texts = [np.empty(0, dtype=np.int64)]  # [T] the observed tokens, by text
        self.paces: list[CostModels | None] = [None]
        self.resting = [False]  # whether a text goes without drafts this cycle
        self.chains: list[list[int]] = [[]]  # forced tokens of this cycle, by text

    @property
    def timed(self) -> bool:
        return self.times is not None

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def draft_trees(
        self,
        roots: Tensor,
        laws: Sequence[Law],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        # 1. Forced tokens, and texts that go without drafts this cycle.
        self.chains = [law.forced() for law in laws]
        self.resting = [self._rests(row, law) or law.over for row, law in enumerate(laws)]
        trees = []
        for row, (root, chain) in enumerate(zip(roots.split(1), self.chains, strict=True)):
            # 2. The tree below the root and its forced tokens, or the part that pays.
            tree = root_only(root.new_tensor(chain[-1:]) if chain else root)
            if not self.resting[row]:
                text = np.concatenate([self.texts[row], root.cpu().numpy(), chain])
                tree = self.drafters[row].draft(text.astype(np.int64), generators[row])
                if paces := self.paces[row]:
                    drafter = self.drafters[row]
                    chances = drafter.chances if remembers(drafter) else None
                    tree = part(tree, paces.present, chances)
                tree = moved(tree, roots.device)

            # 3. The forced tokens above it.
            if chain:
                tree = hung_below(root, chain, tree)
            trees.append(tree)
        return trees

    def _rests(self, row: int, law: Law) -> bool:
        if not self.times:
            return False
        paces = self.paces[row] = self.paces[row] or CostModels(self.times)
        pace, drafter = paces.among(law.company(len(self.texts))), self.drafters[row]
        return not remembers(drafter) and rests(pace, drafter.widest)

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        for row, (path, out) in enumerate(zip(paths, outs, strict=True)):
            above = len(self.chains[row])  # nodes that are not the drafter's
            below = [node - above for node in path[above:]]
            if paces := self.paces[row]:
                paces.present.update(below)
            if not self.resting[row]:
                self.drafters[row].settle(len(below), replace(out, logits=out.logits[above:]))

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        new = [known[:-1].cpu().numpy() for known in tokens]
        self.texts = [np.concatenate(pair) for pair in zip(self.texts, new, strict=True)]

    def enter(self, memory: str | None) -> None:
        (drafter,) = self.drafters
        if remembers(drafter):
            drafter.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        if remembers(drafter := self.drafters[0]):
            drafter.remember(memory, answer)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]
        self.drafters = [drafter.new() for drafter in self.drafters]
        self.paces, self.resting = [None] * len(lengths), [False] * len(lengths)

    def new(self) -> "GivenDrafter":
        return GivenDrafter(self.drafters[0].new(), self.name, self.times)

    def paced(self, times: CostBy) -> "GivenDrafter":
        """Another of its kind that drafts only what pays."""
        return GivenDrafter(self.drafters[0].new(), self.name, times)


def moved(tree: TokenTree, device: torch.device) -> TokenTree:
    """A tree without laws on another device."""
    rows = tree.rows
    if rows:
        rows = Rows(rows.tokens.to(device), rows.depth.to(device), rows.mask.to(device), rows.asked)
    names = ("tokens", "parents", "depth", "ancestors")
    return replace(tree, rows=rows, **{name: getattr(tree, name).to(device) for name in names})
