"""Base classes of proposers that run layers over pairs (feature, following token).

EAGLE's heads, block heads and MTP layers read a sequence as pairs: the target's feature at a position, and
the token at the next one. Five tokens; the last one, e, is the root:

    token      a    b    c    d    e
    feature    f0   f1   f2   f3   .
    pairs      f0,b f1,c f2,d f3,e

The calls of a cycle. Pairs wait until `begin` runs the layers over them; then the cache holds their keys and
values. u3 and u4 are states of the layers, x and y tokens after e; x is drafted and accepted:

    call                                waiting             cache                     layers read
    observe(f0 f1 f2 f3, a b c d e)     f0,b f1,c f2,d f3,e -                         -
    begin(e) -> logits from u3          -                   f0,b f1,c f2,d f3,e       f0,b f1,c f2,d f3,e
    extend(x) -> logits from u4         -                   f0,b f1,c f2,d f3,e u3,x  u3,x
    observe(f4 f5, e x y)               f4,x f5,y           f0,b f1,c f2,d f3,e u3,x  -
    rewind(2)                           -                   f0,b f1,c                 -
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from treespec.draft.drafter import PREFILL_AT, Frontier, Proposer, RowHolder, pad_frontiers
from treespec.model.cache import TreeCache
from treespec.model.cuda_graphs import Graphs
from treespec.model.masks import Chunk, pad_and_stack, split_causal_chunks, unpad_rows
from treespec.model.target import Target
from treespec.trees.tree import to_device

MAX_WAITING_PAIRS = 1024  # of a sequence, on a CPU


@dataclass(frozen=True)
class WaitingPairs:
    """The observed pairs of one sequence that the layers have not yet run over.

    Attributes:
        feature_parts: [n, F] each, the target's features at the positions of each call of `observe`.
        token_parts: [n] int64 each, the token after each of these positions.
        count: the number of pairs.
    """

    feature_parts: tuple[Tensor, ...]
    token_parts: tuple[Tensor, ...]
    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, pairs: slice) -> "WaitingPairs":
        tokens = self.tokens[pairs]
        return WaitingPairs((self.features[pairs],), (tokens,), len(tokens))

    @property
    def features(self) -> Tensor:
        """[n, F] the features of all pairs."""
        if len(self.feature_parts) == 1:
            return self.feature_parts[0]
        return torch.cat(self.feature_parts)

    @property
    def tokens(self) -> Tensor:
        """[n] int64, the tokens of all pairs."""
        if len(self.token_parts) == 1:
            return self.token_parts[0]
        return torch.cat(self.token_parts)

    def append(self, features: Tensor, tokens: Tensor) -> "WaitingPairs":
        """Returns these pairs, followed by later ones. features: [n, F]. tokens: [n] int64."""
        count = self.count + tokens.shape[0]
        if not self.count:
            return WaitingPairs((features,), (tokens,), count)
        return WaitingPairs((*self.feature_parts, features), (*self.token_parts, tokens), count)


class PairProposer(Proposer):
    """Drafts with a head whose layers read pairs and cache their keys and values.

    Observed pairs wait in `states` until `begin` runs the layers over them. If more than `most_waiting` wait, the
    layers run at once, over all but the last.

    Attributes:
        head: the head; each subclass names its class.
        states: the waiting pairs of each sequence.
        cache: keys and values of the pairs that the layers have read, then those of drafted levels.
        most_waiting: pairs of a sequence that may wait. It is large on a CPU: the first token of an answer does not
            wait for the head, and if drafts do not pay, a text often ends before the layers read its pairs.
    """

    head: Any
    states: list[WaitingPairs]

    def __init__(self, head: Any, target: Target) -> None:
        self.head = head
        self.target = target
        self.vocab_size = target.vocab_size
        self.cache = TreeCache(head.cached_layers)
        self.graphs = Graphs(type(head).__name__) if target.tree_decoder.graphs else None
        nothing = torch.empty(0, head.feature_size, dtype=target.dtype, device=target.output_device)
        self.nothing = WaitingPairs((nothing,), (nothing.new_empty(0, dtype=torch.int64),), 0)
        self.states = [self.nothing]
        self.most_waiting = PREFILL_AT
        if target.output_device.type == "cpu":
            self.most_waiting = MAX_WAITING_PAIRS

    @property
    def records_graphs(self) -> bool:
        return self.graphs is not None

    def new(self) -> Self:
        return type(self)(self.head, self.target)

    @property
    def row_holders(self) -> list[RowHolder]:
        return [self.cache]

    def run_layers(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> Tensor:
        """Runs the layers over a chunk of new pairs. A head without layers returns the features.

        Args:
            chunk: positions of the pairs, and the columns that each of them sees.
            features: [B, n, F] the target's features.
            tokens: [B, n] int64, the token after each of them.
            roots: [B] int64 with the last chunk of `begin`; None with all other chunks.

        Returns:
            [B, n, H] the states of the pairs.
        """
        return features

    @abstractmethod
    def draft_first_level(self, last: Tensor, roots: Tensor) -> Tensor:
        """Returns [B, 1, N] draft logits for the children of the roots.

        last: [B, H] the states of the sequences' last pairs. roots: [B] int64.
        """

    @torch.no_grad()
    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        if not any(map(len, self.states)):
            return [None] * len(self.states)
        roots = to_device(roots, self.target.output_device)
        logits: list[Tensor | None] = list(self.draft_first_level(self.run(roots), roots))
        for row, length in enumerate(self.cache.lengths):
            if not length:
                logits[row] = None
        return logits

    @torch.no_grad()
    def run(self, roots: Tensor | None = None) -> Tensor:
        """Runs the layers over the waiting pairs, and drops the keys and values of drafted levels.

        Returns [B, H] the states of the sequences' last pairs.
        """
        self.cache.rewind(self.cache.lengths)
        features = pad_and_stack([pairs.features for pairs in self.states])
        tokens = pad_and_stack([pairs.tokens for pairs in self.states])
        counts = list(map(len, self.states))
        last: list[Tensor] = []
        for chunk in split_causal_chunks(
            self.cache, counts, self.target.choose_chunk_beside, tokens.device
        ):
            is_last = chunk.columns.stop >= max(counts)
            chunk_roots = None
            if is_last:
                chunk_roots = roots
            states = self.run_layers(
                chunk, features[:, chunk.columns], tokens[:, chunk.columns], chunk_roots
            )
            if not last:
                last = list(states[:, 0])
            for row, taken in enumerate(chunk.taken):
                if taken:
                    last[row] = states[row, taken - 1]
        self.states = [self.nothing] * len(counts)
        if len(last) == 1:
            return last[0][None]
        return torch.stack(last)

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, (new_features, new_tokens) in enumerate(zip(features, tokens, strict=True)):
            following = to_device(new_tokens[1:], new_features.device)
            self.states[row] = self.states[row].append(new_features, following)
        if max(map(len, self.states)) > self.most_waiting:
            self.read_all_but_last()

    def read_all_but_last(self) -> None:
        """Runs the layers over the waiting pairs but the last of each sequence, which waits on."""
        last_pairs = [pairs[-1:] for pairs in self.states]
        self.states = [pairs[:-1] for pairs in self.states]
        self.run()
        self.states = last_pairs

    def rewind(self, lengths: Sequence[int]) -> None:
        cached_lengths = self.cache.lengths
        for row, length in enumerate(lengths):
            self.states[row] = self.states[row][: max(0, length - cached_lengths[row])]
        self.cache.rewind(list(map(min, cached_lengths, lengths)))


class DeepeningProposer(PairProposer):
    """Drafts each level from the states of the level above."""

    @abstractmethod
    def draft_next_states(self, tokens: Tensor, above: Tensor) -> Tensor:
        """Returns [B, F, H] the states of the frontiers' nodes.

        tokens: [B, F] the target's tokens, padded. above: [B, F] the row of each node's parent in the frontier above.
        """

    @abstractmethod
    def compute_draft_logits(self, states: Tensor) -> Tensor:
        """Returns [..., N] draft logits of this level. states: [..., H]."""

    def to_target_tokens(self, tokens: Tensor) -> Tensor:
        """Converts the draft tokens [B, F] of the frontiers to the target's."""
        if self.vocabulary is None:
            return tokens
        return self.vocabulary[tokens]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        tokens, above, sizes = pad_frontiers(frontiers, self.target.output_device)
        tokens = self.to_target_tokens(tokens)
        states = unpad_rows(self.draft_next_states(tokens, above), sizes)
        return list(self.compute_draft_logits(states).split(sizes))


class AtOnceProposer(PairProposer):
    """Drafts all levels from the sequence, whatever the tokens of the levels above.

    Attributes:
        level: the level that `extend` drafted last.
        level_logits: [B, D, N] draft logits of all levels of this cycle.
    """

    at_once = True
    level = 0
    level_logits: Tensor

    @abstractmethod
    def draft_all_levels(self, last: Tensor) -> Tensor:
        """Returns [B, D, N] draft logits of all levels. last: [B, H] the states of the last pairs."""

    def draft_first_level(self, last: Tensor, roots: Tensor) -> Tensor:
        self.level = 0
        self.level_logits = self.draft_all_levels(last)
        return self.level_logits[:, :1]

    def compute_all_levels(self, row: int) -> Tensor:
        return self.level_logits[row]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        self.level += 1
        return repeat_level(self.level_logits[:, self.level], frontiers)


def repeat_level(logits: Tensor, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
    """Returns for each sequence [F, N] the draft logits of a level, the same below each of its F frontier nodes.

    logits: [B, N]. frontiers: of the B sequences; None: a finished tree, with no nodes.
    """
    repeated = []
    for rows, frontier in zip(logits[:, None], frontiers, strict=True):
        node_count = 0
        if frontier:
            node_count = len(frontier.tokens)
        repeated.append(rows.expand(node_count, -1))
    return repeated
