"""What a cycle's tree was made of: draft logits by path, the target's logits, the accepted nodes.

`treespec.trace` puts these two between the decoder and the parts that draft. The decoder knows
nothing of them, so that a generation without a trace does no work for one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.draft.drafter import Drafter
from treespec.draft.proposer import Frontier, Proposer
from treespec.draft.vocabulary import spread
from treespec.shaping.law import Law, Path
from treespec.target import TreeOutput
from treespec.trees.tree import TokenTree


@dataclass(frozen=True)
class Recorded:
    """One cycle. logits: [N, V] the target's. path: accepted nodes, without the root.

    own: the target's own token after them. draft_logits: by the path of each node that was
    expanded, [V], or [M, V] of M draft models.
    """

    tree: TokenTree
    logits: Tensor
    path: list[int]
    own: int
    draft_logits: dict[Path, Tensor]


@final
class HeardProposer:
    """A proposer of one text that keeps the draft logits of the present cycle.

    logits: filled anew in each cycle; `new` shares it.
    """

    def __init__(self, proposer: Proposer, logits: dict[Path, Tensor]) -> None:
        self.proposer, self.logits = proposer, logits
        self.paths: list[Path] = []  # of the last frontier

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        begun = self.proposer.begin(roots, cache)
        self.logits.clear()
        self.paths = [()]
        if begun[0] is not None:
            self._keep(begun[0])
        return begun

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        logits = self.proposer.extend(frontiers)
        if frontier := frontiers[0]:
            tokens, vocabulary = frontier.tokens, self.proposer.vocabulary
            named = tokens if vocabulary is None else vocabulary[tokens]
            links = zip(frontier.parent_rows.tolist(), named.tolist(), strict=True)
            self.paths = [(*self.paths[row], token) for row, token in links]
            self._keep(logits[0])
        return logits

    def new(self) -> "HeardProposer":
        return HeardProposer(self.proposer.new(), self.logits)

    def _keep(self, rows: Tensor) -> None:
        vocabulary = self.proposer.vocabulary
        if vocabulary is not None:
            rows = spread(rows, vocabulary, self.proposer.vocab_size, -torch.inf)
        self.logits.update(zip(self.paths, rows, strict=True))


@final
class Recorder:
    """A drafter of one text that hands each cycle to `keep` when the text has grown by it.

    draft_logits: those that a `HeardProposer` keeps; empty for drafters without a draft model.
    """

    def __init__(
        self,
        drafter: Drafter,
        draft_logits: dict[Path, Tensor],
        keep: Callable[[Recorded], None],
    ) -> None:
        self.drafter, self.draft_logits, self.keep = drafter, draft_logits, keep
        self.tree: TokenTree | None = None
        self.settled: tuple[Tensor, list[int]] | None = None  # the target's logits, the path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def draft_trees(
        self,
        roots: Tensor,
        laws: Sequence[Law],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float],
    ) -> list[TokenTree]:
        self.draft_logits.clear()  # a cycle that rests drafts nothing
        trees = self.drafter.draft_trees(roots, laws, generators, cache, now)
        self.tree = trees[0]
        return trees

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        self.drafter.settle(paths, outs)
        self.settled = outs[0].logits, list(paths[0])

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.drafter.observe(features, tokens)
        if self.tree is None or self.settled is None:  # a prompt's tokens
            return
        logits, path = self.settled
        own, self.settled = int(tokens[0][-1]), None
        self.keep(Recorded(self.tree, logits, path, own, dict(self.draft_logits)))

    def new(self) -> "Recorder":
        return Recorder(self.drafter.new(), self.draft_logits, self.keep)


def heard(proposer: Proposer, logits: dict[Path, Tensor]) -> Proposer:
    """The proposer, and its draft logits in `logits`."""
    return cast(Proposer, HeardProposer(proposer, logits))


def recorded(
    drafter: Drafter, draft_logits: dict[Path, Tensor], keep: Callable[[Recorded], None]
) -> Drafter:
    """The drafter, and every cycle of it to `keep`."""
    return cast(Drafter, Recorder(drafter, draft_logits, keep))
