"""Drafters without a model: their tokens come from the text, a datastore or guesses.

The children are a function of the text and of earlier draws, so their distribution is one-hot. The
plan is that of `topk`: sample p and see whether the token is a child. No other scheme's q describes
them.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.cost.model import CostBy
from treespec.draft.cost.running import CostModel, CostModels
from treespec.draft.drafter import Drafter, Renewed
from treespec.draft.model_free.budget import part, rests
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.distribution import Distribution
from treespec.trees.tree import Rows, TokenTree, hung_below, root_only


class TextDrafter(Renewed, ABC):
    """Drafts for one sequence.

    widest: the most nodes and rows of a forward with extra rows; 0: it adds no rows.
    probabilities: [N] Pr(a node of the latest tree is accepted | its parent is); None: it makes no
    estimate.
    """

    widest: int = 0
    probabilities: np.ndarray | None = None

    @abstractmethod
    def draft(self, text: np.ndarray, generator: torch.Generator) -> TokenTree:
        """The tree below the last token, the root, on the host. text: [T] int64."""

    def settle(self, accepted: int, out: TreeOutput) -> None:
        """Feedback after a cycle: the number of accepted draft tokens, and the target's output on
        the tree.
        """
        return

    def enter(self, cache: str | None) -> None:
        """A sequence begins. cache: the suffix cache that it may draft from, too; None: none."""
        return

    def remember(self, cache: str, completion: Sequence[int]) -> None:
        """A completion has ended, of any sequence."""
        return


@final
class OneHotDrafter(Drafter):
    """A `TextDrafter` and all observed tokens for each of B sequences; one at first.

    name: its kind, as `--drafter` takes it. times: with them it drafts only the part of a tree that
    pays (`treespec.draft.model_free.budget`); None: whole trees.
    """

    per_text = ("texts", "drafters", "paces", "resting")
    taps: tuple[int, ...] = ()
    one_hot = True

    def __init__(self, drafter: TextDrafter, name: str, times: CostBy | None = None) -> None:
        self.name, self.drafters, self.times = name, [drafter], times
        self.texts = [np.empty(0, dtype=np.int64)]  # [T] the observed tokens, by sequence
        self.paces: list[CostModels | None] = [None]
        self.resting = [False]  # whether a sequence goes without drafts this cycle
        self.chains: list[list[int]] = [[]]  # forced tokens of this cycle, by sequence

    @property
    def timed(self) -> bool:
        return self.times is not None

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    def draft_trees(
        self,
        roots: Tensor,
        laws: Sequence[Distribution],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        self.chains = [law.forced() for law in laws]
        trees = []
        for row, (law, root, generator) in enumerate(zip(laws, roots, generators, strict=True)):
            pace, drafter, chain = self.pace(row, law), self.drafters[row], self.chains[row]
            waits = pace and drafter.probabilities is None and rests(pace, drafter.widest)
            self.resting[row] = bool(waits) or law.over
            if self.resting[row]:
                last = root.new_tensor(chain[-1:]) if chain else root[None]
                trees.append(self.below_chain(row, root, root_only(last)))
            else:
                trees.append(self.below_chain(row, root, self.tree(row, root, generator, pace)[0]))
        return trees

    def tree(
        self, row: int, root: Tensor, generator: torch.Generator, pace: CostModel | None
    ) -> tuple[TokenTree, np.ndarray | None]:
        """The tree below a sequence's root [] and its forced tokens, or the part that pays, on the
        host; and the drafter's probabilities of its nodes.
        """
        last = [root.cpu().numpy()[None], self.chains[row]]
        text = np.concatenate([self.texts[row], *last]).astype(np.int64)
        tree = self.drafters[row].draft(text, generator)
        probabilities = self.drafters[row].probabilities
        return part(tree, pace, probabilities) if pace else (tree, probabilities)

    def below_chain(self, row: int, root: Tensor, tree: TokenTree) -> TokenTree:
        """A tree on the root's device, below the forced tokens."""
        own, chain = moved(tree, root.device), self.chains[row]
        return hung_below(root[None], chain, own) if chain else own

    def pace(self, row: int, law: Distribution) -> CostModel | None:
        """What drafting costs and brings this sequence; None: it is not asked."""
        if not self.times:
            return None
        paces = self.paces[row] = self.paces[row] or CostModels(self.times)
        return paces.among(law.company(len(self.texts)))

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
        drafter.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        self.drafters[0].remember(memory, answer)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]
        self.drafters = [drafter.new() for drafter in self.drafters]
        self.paces, self.resting = [None] * len(lengths), [False] * len(lengths)

    def new(self) -> "OneHotDrafter":
        return OneHotDrafter(self.drafters[0].new(), self.name, self.times)

    def paced(self, times: CostBy) -> "OneHotDrafter":
        """Another of its kind that drafts only what pays."""
        return OneHotDrafter(self.drafters[0].new(), self.name, times)


def moved(tree: TokenTree, device: torch.device) -> TokenTree:
    """A tree without draft distributions on another device."""
    rows = tree.rows
    if rows:
        rows = Rows(rows.tokens.to(device), rows.depth.to(device), rows.mask.to(device), rows.asked)
    parts = (tree.tokens, tree.parents, tree.depth, tree.ancestors)
    tokens, parents, depth, ancestors = (part.to(device) for part in parts)
    return TokenTree(tokens, parents, depth, ancestors, rows=rows)
