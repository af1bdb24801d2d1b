"""The trees that a test of a verifier drafts from its tables."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

DrawTokens: TypeAlias = Callable[[np.ndarray, int], list[int]]  # (q [V], width) -> drawn tokens
Drawn: TypeAlias = Literal["independent", "without replacement", "greedy"] | DrawTokens
# p [N, V], q [N, V], tokens [N], parents [N] -> the accepted tokens and one more
Judge: TypeAlias = Callable[[Any, Any, Any, Any], Sequence[int]]
Text = tuple[int, ...]
Table = Mapping[Text, np.ndarray]  # a distribution [V] after each text


TRIAL_SIZES = ((2, 1), (3, 1), (2, 2), (3, 2))  # tokens and levels, the smallest first


@dataclass(frozen=True)
class ConformanceTrial:
    """How trees are drafted, and how often.

    Attributes:
        widths: children of each node, by level.
        draws: how siblings are drawn, or a function that draws them.
        runs: cycles on each pair of tables.
        error: probability that an exact verifier fails one pair of tables.
        generator: of tables, drafts and tokens after the verdict.
    """

    widths: Sequence[int]
    draws: Drawn
    runs: int
    error: float
    generator: np.random.Generator

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(tokens, levels) of the tables. Siblings that must differ need a vocabulary of at least their number."""
        fitting = []
        for vocab, depth in TRIAL_SIZES:
            if depth > len(self.widths):
                continue
            may_repeat = callable(self.draws) or self.draws == "independent"
            if may_repeat or vocab >= max(self.widths[:depth]):
                fitting.append((vocab, depth))
        return fitting


@dataclass(frozen=True)
class TrialTree:
    """A drafted tree of N nodes.

    Attributes:
        texts: the drafted tokens from the root to each node; () at the root.
        parents: [N] each node's parent; -1 at the root.
    """

    texts: list[Text]
    parents: list[int]

    @property
    def tokens(self) -> list[int]:
        """[N] the nodes' tokens; -1 at the root."""
        return [-1, *(text[-1] for text in self.texts[1:])]


def draft_trial_tree(q: Table, depth: int, trial: ConformanceTrial) -> TrialTree:
    """Draft a tree of up to `depth` levels, with children drawn from q.

    Widths (2, 1), draws 1 0 at the root, then 0 and 0:

        0 ─┬─ 1 ─── 3        texts      () (1) (0) (1 0) (0 0)
           └─ 2 ─── 4        parents    -1 0 0 1 2
    """
    texts: list[Text] = [()]
    parents = [-1]
    level = [0]
    for width in trial.widths[:depth]:
        above = level
        level = []
        for node in above:
            for token in draw_children(q[texts[node]], width, trial.draws, trial.generator):
                level.append(len(texts))
                texts.append(texts[node] + (token,))
                parents.append(node)
    return TrialTree(texts, parents)


def draw_children(
    q: np.ndarray, width: int, draws: Drawn, generator: np.random.Generator
) -> list[int]:
    """Draw the tokens of one node's children.

    Args:
        q: [V] the draft's distribution at the node.
        width: number of children; "greedy" and "without replacement" give at most V.
        draws: how siblings are drawn.
        generator: numpy's.
    """
    if callable(draws):
        return draws(q, width)
    if draws == "independent":
        return [sample_index(q, generator) for _ in range(width)]
    if draws == "greedy":
        return (-q).argsort(kind="stable")[:width].tolist()
    race = (
        generator.exponential(size=len(q)) / q
    )  # arrival times; the first to arrive are draws without replacement
    return race.argsort()[:width].tolist()


def sample_index(weights: np.ndarray, generator: np.random.Generator) -> int:
    """Draw a token in proportion to the weights [V]."""
    sums = weights.cumsum()
    index = int(sums.searchsorted(generator.random() * sums[-1], side="right"))
    return min(index, len(sums) - 1)
