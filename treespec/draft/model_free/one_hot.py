"""Drafters without a model: their tokens come from the text, a datastore or guesses.

The children are a function of the text and of earlier draws, so their distribution is one-hot. The
plan is that of `topk`: sample p and see whether the token is a child. No other scheme's q describes
them.

`--verifier auto` lets the target score no more than pays. A drafter without a model gives its tokens
no probabilities. So each child gets one by its rank among its siblings, corrected by what was accepted
so far (`treespec.draft.cost.running`).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from treespec.draft.cost.model import CostBy, best_size
from treespec.draft.cost.running import CERTAIN, CostModel, CostModels, Prediction
from treespec.draft.drafter import Renewed
from treespec.draft.grow.shaped import ForcedDrafter
from treespec.model.cache import TreeCache
from treespec.model.target import TreeOutput
from treespec.shaping.distribution import Distribution
from treespec.trees.tree import Rows, TokenTree, connect, root_only

# Pr(accepted) of the first, second, … child before any feedback; the last is for all further ones.
RATES = (0.6, 0.12, 0.06, 0.03)
# Tokens a cycle of a drafter with rows of its own (Lookahead in Spec-Bench, 2401.07851).
ROWS_BRING = 1.6


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
class OneHotDrafter(ForcedDrafter):
    """A `TextDrafter` and all observed tokens for each of B sequences; one at first.

    name: its kind, as `--drafter` takes it. times: with them it drafts only the part of a tree that
    pays (`part`); None: whole trees.
    """

    per_text = ("texts", "drafters", "paces", "resting")
    taps: tuple[int, ...] = ()
    one_hot = True

    def __init__(self, drafter: TextDrafter, name: str, times: CostBy | None = None) -> None:
        self.name, self.drafters, self.times = name, [drafter], times
        self.texts = [np.empty(0, dtype=np.int64)]  # [T] the observed tokens, by sequence
        self.paces: list[CostModels | None] = [None]
        self.resting = [False]  # whether a sequence goes without drafts this cycle

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
        self.chains, trees = [law.forced() for law in laws], []
        for row, (law, root) in enumerate(zip(laws, roots.split(1), strict=True)):
            pace, drafter = self.pace(row, law), self.drafters[row]
            waits = pace and drafter.probabilities is None and rests(pace, drafter.widest)
            self.resting[row] = bool(waits) or law.over
            if self.resting[row]:
                trees.append(root_only(self.end(row, root)))
            else:
                last = [*root.tolist(), *self.chains[row]]
                trees.append(moved(self.tree(row, last, generators[row], pace)[0], root.device))
        return self.hung(roots, trees, generators)

    def tree(
        self, row: int, last: list[int], generator: torch.Generator, pace: CostModel | None
    ) -> tuple[TokenTree, np.ndarray | None]:
        """A sequence's tree, or the part that pays, on the host, and its nodes' probabilities.

        last: the root and the forced tokens. Probabilities are the drafter's; None: it has none.
        """
        text = np.concatenate([self.texts[row], np.array(last, dtype=np.int64)])
        tree = self.drafters[row].draft(text, generator)
        probabilities = self.drafters[row].probabilities
        return part(tree, pace, probabilities) if pace else (tree, probabilities)

    def pace(self, row: int, law: Distribution) -> CostModel | None:
        """What drafting costs and brings this sequence; None: it is not asked."""
        if not self.times:
            return None
        paces = self.paces[row] = self.paces[row] or CostModels(self.times)
        return paces.among(law.company(len(self.texts)))

    def learn(self, row: int, path: list[int], out: TreeOutput) -> None:
        if paces := self.paces[row]:
            paces.present.update(path)
        if not self.resting[row]:
            self.drafters[row].settle(len(path), out)

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
        return self.paced(self.times)

    def paced(self, times: CostBy | None) -> "OneHotDrafter":
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


def part(
    tree: TokenTree, pace: CostModel, known: np.ndarray | None = None
) -> tuple[TokenTree, np.ndarray]:
    """The tree of the nodes worth their time in the forward, and their probabilities [M].

    A tree with extra rows stays whole. It tells the cost model what this cycle's tree brings. tree: on the host,
    without draft distributions. known: [N] Pr(a node is accepted | its parent is), from a drafter that
    learns them itself; None: by rank.
    """
    # 1. The probability that each node is reached.
    parents = tree.parents.numpy()
    chances = of_children(parents) if known is None else known
    believed = chances
    if known is None:
        trust = pace.by_law.factors[np.minimum(parents, 1), (chances < RATES[0]).astype(int)]
        believed = (chances * trust).clip(max=CERTAIN)
    reach = reached(parents, believed)

    # 2. The most likely nodes, at the size that brings the most tokens a second.
    nodes = size = len(reach)
    order = np.argsort(-reach[1:], kind="stable") + 1  # a parent stands before its children
    if not tree.rows:
        size, _ = best_size(reach[order], pace.forward, pace.plain)
        if known is None and size == 1 and nodes > 1 and pace.trying:
            size = 2
    kept = np.sort(np.concatenate([[0], order[: size - 1]]))
    shorter = tree if size == nodes else selected(tree, kept)

    # 3. Predict what they bring; of known probabilities there is nothing to learn.
    if known is not None:
        pace.prediction = None
    elif size > 1 or tree.rows:
        rows = len(tree.rows.tokens) if tree.rows else 0
        cost = float(pace.cost.seconds(size + rows, 0))
        pace.predict(Prediction(cost, shorter.parents.numpy(), chances[kept]), pace.by_law)
    return shorter, chances[kept]


def reached(parents: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """[N] Pr(a node is reached), of Pr(it is accepted | its parent is). parents: [N]."""
    reach = chances.copy()
    reach[0] = 1.0
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        reach[node] *= reach[parent]
    return reach


def of_children(parents: np.ndarray) -> np.ndarray:
    """[N] Pr(a node is accepted | its parent was), by its rank among its siblings. parents: [N]."""
    seen: dict[int, int] = {}
    chances = np.ones(len(parents))
    for node, parent in enumerate(parents.tolist()[1:], start=1):
        place = seen.get(parent, 0)
        chances[node] = RATES[min(place, len(RATES) - 1)]
        seen[parent] = place + 1
    return chances


def selected(tree: TokenTree, kept: np.ndarray) -> TokenTree:
    """The tree of these nodes. kept: [M] ascending, with every node's parent."""
    rows = torch.from_numpy(kept)
    ancestors = tree.ancestors[rows][:, rows]
    return TokenTree(tree.tokens[rows], connect(rows, tree.parents), tree.depth[rows], ancestors)


def rests(pace: CostModel, widest: int) -> bool:
    """Whether a text goes without given tokens this cycle; asked before they are looked for.

    widest: nodes and rows of a forward, for a drafter with rows of its own; 0 for others.
    """
    if widest:
        nodes = len(pace.forward)
        wide = float(pace.forward[min(widest, nodes) - 1]) * max(widest / nodes, 1)
        return pace.pauses(ROWS_BRING / wide)
    first, deeper = (RATES[0] * pace.by_law.factors[:, 0]).clip(max=CERTAIN)
    # [n] tokens that a chain of 0, 1, … given tokens brings.
    tokens = 1 + first * (deeper ** np.arange(len(pace.forward) - 1)).cumsum()
    seconds = pace.forward + pace.cost.overhead[0]
    return pace.pauses(float((tokens / seconds[1:]).max()))
