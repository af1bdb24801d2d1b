"""A memory and a draft model that draft for the same texts (`--drafter suffix+eagle:HEAD`).

Each cycle's tree comes from the memory or from the model, whichever promises more. The choice depends
on the past alone, and a tree of the memory has one-hot laws. So every verifier stays lossless.
"""

import time
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.cost.model import CostBy
from treespec.draft.cost.running import Choice, CostModel, CostModels
from treespec.draft.drafter import Drafter
from treespec.draft.model_free.budget import likely_part
from treespec.draft.model_free.given import moved
from treespec.draft.model_free.suffix import Suffix
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.law import Law
from treespec.trees.tree import TokenTree, hung_below


@final
class UnionDrafter(Drafter):
    """`Suffix` and `TreeDrafter` for each of B texts; one text at first.

    times: with them the memory drafts no more than pays. idle: texts whose present tree is the
    memory's.
    """

    per_text = ("trees", "texts", "memory", "paces", "choices", "idle")

    def __init__(self, trees: TreeDrafter, memory: Suffix, times: CostBy | None) -> None:
        self.trees, self.memory, self.times = trees, [memory], times
        self.policy = trees.policy
        self.texts = [np.empty(0, dtype=np.int64)]  # [T] the observed tokens, by text
        self.paces: list[CostModels | None] = [None]
        self.choices, self.idle = [Choice()], [False]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.trees.taps

    @property
    def timed(self) -> bool:
        return self.times is not None

    @property
    def lengths(self) -> list[int]:
        return self.trees.lengths

    def draft_trees(
        self,
        roots: Tensor,
        laws: Sequence[Law],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        # 1. The memory's trees, and the texts that take them.
        chains = [law.forced() for law in laws]
        rows = zip(range(len(laws)), roots, chains, laws, strict=True)
        given = [self._given(*row) for row in rows]

        # 2. The draft model's trees for the others.
        before = self.trees.forward_seconds
        trees = self.trees.draft_trees(roots, laws, generators, cache, now, self.idle)
        self.forward_seconds += self.trees.forward_seconds - before

        # 3. The memory's, below the forced tokens.
        for row, (tree, chain) in enumerate(zip(given, chains, strict=True)):
            if self.idle[row]:
                own = moved(tree, roots.device)
                trees[row] = hung_below(roots[row : row + 1], chain, own) if chain else own
        return trees

    def _given(self, row: int, root: Tensor, chain: list[int], law: Law) -> TokenTree:
        """The memory's tree below a text's root [] and forced tokens. Settles `idle`."""
        # 1. All that it knows, or the part that pays.
        text = np.concatenate([self.texts[row], root.cpu().numpy()[None], chain]).astype(np.int64)
        tree = self.memory[row].draft(text, torch.Generator())
        pace, chances = self._pace(row, law), self.memory[row].chances
        if pace:
            tree, chances = likely_part(tree, pace, chances)

        # 2. Whether it drafts.
        reach = chances.copy()
        for node, parent in enumerate(tree.parents.tolist()[1:], start=1):
            reach[node] *= reach[parent]
        score, nodes = float(reach[1:].sum()), len(reach)
        preferred = self.choices[row].prefers_memory(score, nodes, pace)
        self.idle[row] = preferred and nodes > 1 and not law.over
        return tree

    def _pace(self, row: int, law: Law) -> CostModel | None:
        if not self.times:
            return None
        paces = self.paces[row] = self.paces[row] or CostModels(self.times)
        return paces.among(law.company(len(self.texts)))

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        rows = zip(paths, self.idle, self.choices, self.trees.builders, strict=True)
        for path, idle, choice, builder in rows:
            if not idle:
                choice.settle(len(path), builder.seconds)
        self.trees.settle(paths, outs)

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.trees.observe(features, tokens)
        new = [known[:-1].cpu().numpy() for known in tokens]
        self.texts = [np.concatenate(pair) for pair in zip(self.texts, new, strict=True)]

    def rewind(self, lengths: Sequence[int]) -> None:
        self.trees.rewind(lengths)
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]
        self.memory = [memory.new() for memory in self.memory]
        self.paces, self.choices = [None for _ in lengths], [Choice() for _ in lengths]

    def enter(self, memory: str | None) -> None:
        (own,) = self.memory
        own.enter(memory)

    def remember(self, memory: str, answer: Sequence[int]) -> None:
        self.memory[0].remember(memory, answer)

    def new(self) -> "UnionDrafter":
        return UnionDrafter(self.trees.new(), self.memory[0].new(), self.times)
