"""The EAGLE heads as proposers. The cache keeps the target's features of accepted tokens, and
forgets those that the head drafted.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from treespec.draft.proposer import Frontier, aligned
from treespec.draft.trained.pairs import PairProposer
from treespec.errors import InputError
from treespec.heads.eagle import EagleHead, config_for
from treespec.heads.features import FeatureHead
from treespec.model.cache import TreeCache
from treespec.model.chunks import causal_chunks
from treespec.model.masks import rows_of, together, unpadded
from treespec.model.quantised import is_plain, table_of
from treespec.model.target import Target
from treespec.trees.mask import committed


def new_head(target: Target, bias: bool = True) -> EagleHead:
    """An untrained head for a target, in float32, with the target's embedding. bias: of fc."""
    config = config_for(target.config, target.feature_width, target.vocab_size, target.embed_scale)
    head = EagleHead(config | {"bias": bias})
    assert head.embed_tokens is not None
    head.embed_tokens.weight = embedding_of(target)
    return head


def embedding_of(target: Target) -> nn.Parameter:
    """[V, E] the target's embedding; a copy in floats where that is quantised.

    Raises InputError if it is offloaded.
    """
    embedding = target.model.get_input_embeddings()
    if embedding.weight.is_meta:
        raise InputError(
            "the target's embedding is offloaded; give it room on a device, where the head takes "
            "it from"
        )
    table = table_of(embedding)
    return table if isinstance(table, nn.Parameter) else nn.Parameter(table, requires_grad=False)


def embedding_to_share(target: Target) -> nn.Parameter | nn.Module:
    """The target's embedding as a head may hold it too: its weight, or the module of another."""
    embedding = target.model.get_input_embeddings()
    return embedding.weight if is_plain(embedding) else embedding


@final
class EagleProposer(PairProposer):
    """Drafts with a head and the target's output path; one text at first.

    Levels of the trees are written behind the pairs in the head's own cache, one row a text, and
    forgotten by the next `begin`:

        | observed pairs | level 1 | level 2 | ...

    Texts with fewer pairs or frontier nodes are padded with ones that no node sees.
    """

    head: FeatureHead

    def __init__(
        self,
        head: FeatureHead,
        target: Target,
        chunk: int | None = None,
    ) -> None:
        """chunk: pairs per forward of the head. Default: the target's chunk size."""
        self.head = head
        self.start(target, chunk, len(head.attentions), head.feature_size, head.dtype)
        self.positions = torch.empty(0)  # [B, 1] positions of the last level's features
        self.frontier = torch.empty(0)  # [B, F, H] features extrapolated at the frontiers
        self.seen = torch.empty(0)  # [B, F, T] bool: cache columns that each frontier node sees

    def new(self) -> "EagleProposer":
        return EagleProposer(self.head, self.target, self.chunk)

    def take(self) -> None:
        self.begin()

    @torch.no_grad()
    def begin(
        self, roots: Tensor | None = None, cache: TreeCache | None = None
    ) -> list[Tensor | None]:
        counts = [len(pairs) for pairs in self.waiting]
        if not any(counts):
            return [None] * len(counts)

        # 1. The head runs over the pairs that wait; drafted levels are forgotten.
        self.cache.rewind(self.cache.lengths)
        pairs = [pairs.joined() for pairs in self.waiting]
        device = pairs[0][1].device
        last = [torch.empty(0)] * len(counts)  # [H] at each text's last pair
        for chunk in causal_chunks(self.cache, counts, self.chunk_size, device):
            features = self.head.fuse(together([f[chunk.columns] for f, _ in pairs]))  # [B, n, H]
            tokens = together([t[chunk.columns] for _, t in pairs])  # [B, n]
            hidden = self._forward(tokens, features, chunk.positions, chunk.seen)
            for row, taken in enumerate(chunk.taken):
                if taken or not chunk.columns.start:
                    last[row] = hidden[row, taken - 1]
        self.waiting = self.none_waiting(len(counts))

        # 2. Level 1 grows from the last pairs.
        self.frontier = torch.stack(last)[:, None]
        self.seen = committed(self.cache.lengths, device)
        self.positions = torch.tensor(self.cache.lengths, device=device)[:, None] - 1
        logits = self.head.logits(self.frontier, self.target)
        return [
            row if length else None for row, length in zip(logits, self.cache.lengths, strict=True)
        ]

    @torch.no_grad()
    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        tokens, above, sizes = aligned(frontiers, self.frontier.device)
        b, n = tokens.shape
        own = torch.eye(n, dtype=torch.bool, device=tokens.device).expand(b, n, n)
        self.seen = torch.cat([rows_of(self.seen, above), own], dim=2)
        self.positions = self.positions + 1
        if self.vocabulary is not None:
            tokens = self.vocabulary[tokens]
        self.frontier = self._forward(
            tokens, rows_of(self.frontier, above), self.positions, self.seen
        )
        logits = self.head.logits(unpadded(self.frontier, sizes), self.target)
        return list(logits.split(sizes))

    def _forward(self, tokens: Tensor, features: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """One step of the head; its keys and values stay in the cache. Returns [B, T, H].

        tokens: [B, T]. features: [B, T, H]. positions: [B, T or 1]. mask: [B, T, P + T].
        """
        layers = self.cache.tree_layers
        hidden = self.head.step(tokens, features, positions, mask[:, None], layers)
        for layer in layers:
            layer.length += tokens.shape[1]
        return hidden
