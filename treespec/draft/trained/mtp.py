"""MTP layers: the layers of a checkpoint that predict the tokens after the next (2412.19437).

A layer takes the target's last hidden state at position t, after its final norm, with the embedding
of token t + 1. It gives the state that the output embedding turns into the logits of token t + 2.
A second layer takes the first one's states, and so on. Five tokens, two layers:

    position         0     1     2     3     4
    token            a     b     c     d     e
    target           h0    h1    h2    h3    .
    layer 0 sees     .     h0,b  h1,c  h2,d  h3,e       at the token's own column
    layer 0 gives    .     u1    u2    u3    u4         u4 drafts the token after e
    layer 1 sees     .     .     u1,c  u2,d  u3,e
    layer 1 gives    .     .     v2    v3    v4         v4 has seen e, and drafts two after it

To draft deeper than it has layers, a checkpoint's last layer takes its own states.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from treespec.draft.models.branch import Levels
from treespec.draft.trained.pairs import DeepeningProposer
from treespec.model.masks import Chunk, additive_masks, rows_of
from treespec.model.target import Target
from treespec.trees.mask import committed, positions


@final
class MtpLayer(nn.Module):
    """A decoder layer of the target's own class, over embedding and hidden state side by side.

    embedding_first: their order (`Layout`). embedding, head: the layer's own, where its checkpoint
    has other ones than the target.
    """

    def __init__(
        self, width: int, norm: Callable[[], nn.Module], block: nn.Module, embedding_first: bool
    ) -> None:
        """width: H. norm: makes a norm of width H as the target has it."""
        super().__init__()
        self.token_norm, self.hidden_norm, self.final_norm = norm(), norm(), norm()
        self.project = nn.Linear(2 * width, width, bias=False)
        self.block, self.embedding_first = block, embedding_first
        self.embedding: nn.Embedding | None = None
        self.head: nn.Linear | None = None

    def forward(self, embeddings: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """[B, T, H] embeddings and hidden states -> [B, T, H] the states of the next step.

        options: of the decoder layer: mask, positions and cache.
        """
        both = [self.token_norm(embeddings), self.hidden_norm(hidden)]
        x = self.project(torch.cat(both if self.embedding_first else both[::-1], dim=-1))
        out = self.block(x, **options)
        return self.final_norm(out[0] if isinstance(out, tuple) else out)


@final
class Mtp(nn.Module):
    """The MTP layers of a target. kind: their layer type, a key of the target's windows."""

    def __init__(self, layers: list[MtpLayer], kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(layers), kind
        for number, layer in enumerate(layers):  # its place in the cache
            for module in layer.modules():
                if "layer_idx" in vars(module):
                    vars(module)["layer_idx"] = number

    def __len__(self) -> int:
        return len(self.layers)

    def layer(self, number: int) -> MtpLayer:
        return cast(MtpLayer, self.layers[number])


@final
class MtpProposer(DeepeningProposer):
    """Drafts with L MTP layers and the target's output path; one sequence at first.

    The pair (target's state at position t, token t + 1) has column t of the cache, in every layer,
    and position t. Layer i takes the state that layer i - 1 gave at the column before, so it has
    nothing at the first i columns. A node at depth d goes through the layers from d on, or through
    the last one; three layers:

        columns    | observed pairs    | level 1 | level 2 | level 3 |   drafts
        layer 0    | x x x x x x       | .       | .       | .       |   level 1
        layer 1    | . x x x x x       | x x     | .       | .       |   level 2
        layer 2    | . . x x x x       | x x     | x x     | x x     |   level 3, 4, …

    The cache has a further layer for each MTP layer but the last, which holds the states that it
    gave, instead of keys.
    """

    head: None
    states: dict[int, Tensor]  # by layer, [B, F, H] at the frontiers
    drafted: Levels
    places: Tensor  # [B, T] int64: positions of all columns
    level = 0

    def __init__(self, mtp: Mtp, target: Target, chunk: int | None = None) -> None:
        """chunk: pairs per forward. Default: the target's chunk size."""
        self.mtp = mtp
        super().__init__(None, target, chunk)

    @property
    def cached_layers(self) -> int:
        return 2 * len(self.mtp) - 1

    @property
    def no_features(self) -> Tensor:
        width, place = self.target.feature_width, self.target.output_device
        return torch.empty(0, width, dtype=self.target.dtype, device=place)

    @property
    def models(self) -> list[nn.Module]:
        return [self.mtp]

    @property
    def identity(self) -> object:
        return ["mtp", len(self.mtp), self.target.config.to_dict(), str(self.target.dtype)]

    def first(self, last: list[Tensor], roots: Tensor) -> Tensor:
        self.level = 0
        self.states = {i: states[:, None] for i, states in enumerate(last)}
        device = last[0].device
        self.drafted = Levels(committed(self.cache.lengths, device))
        self.places = torch.arange(self.cache.end, device=device).expand(len(last[0]), -1)
        return self.logits(self.states[0])

    def pairs(
        self, chunk: Chunk, features: Tensor, tokens: Tensor, roots: Tensor | None
    ) -> list[Tensor]:
        places, stages = positions(chunk.depth, chunk.lengths), [features]
        for i in range(len(self.mtp)):
            below = self._behind(i, stages[-1], chunk.lengths) if i else features
            stages.append(self._forward(i, tokens, below, places, chunk.seen))
        return stages[1:]

    def deeper(self, tokens: Tensor, above: Tensor) -> Tensor:
        # 1. The new nodes' columns.
        self.drafted.extend(above)
        lengths = torch.tensor(self.cache.lengths, device=tokens.device)[:, None]
        places = (lengths + self.level).expand(tokens.shape)
        self.places = torch.cat([self.places, places], dim=1)
        self.level += 1

        # 2. The layers from this level's own on, each over its parent's state in the layer below.
        first, end = min(self.level, len(self.mtp) - 1), len(self.mtp)
        below = {i: self.states[i - 1 if self.level < end else i] for i in range(first, end)}
        seen = self.drafted.seen
        self.states = {
            i: self._forward(i, tokens, rows_of(states, above), self.places, seen)
            for i, states in below.items()
        }
        return self.states[first]

    def _forward(
        self, i: int, tokens: Tensor, below: Tensor, places: Tensor, seen: Tensor
    ) -> Tensor:
        """Layer i over n nodes; its keys and values, and its states, stay in the cache.

        tokens: [B, n]. below: [B, n, H] states of the layer below. places: [B, T] positions of all
        columns. seen: [B, n, T] bool. Returns [B, n, H].
        """
        # 1. No row sees a column before the layer's first, but all see themselves: 0 · NaN is NaN.
        n = tokens.shape[1]
        if i:
            itself = torch.eye(seen.shape[2], dtype=torch.bool, device=seen.device)[-n:]
            seen = (seen & (places[:, None] >= i)) | itself

        # 2. The layer, with the target's masks and rotary angles.
        target, layer, kind = self.target, self.mtp.layer(i), self.mtp.kind
        mask = additive_masks({kind: target.windows[kind]}, places, seen, target.dtype, seen.device)
        embeddings = layer.embedding(tokens) if layer.embedding else target.embeddings(tokens)
        now = places[:, -n:]
        rotary = getattr(target.decoder, "rotary_emb", None)
        hidden = layer(
            embeddings.to(below.dtype),
            below,
            attention_mask=mask,
            position_ids=now,
            position_embeddings=rotary(below, now) if rotary else None,
            past_key_values=self.cache,
            use_cache=True,
        )

        # 3. What the next layer takes at the next column.
        kept = [self.cache.tree_layers[i]]
        if i + 1 < len(self.mtp):
            kept.append(self.cache.tree_layers[len(self.mtp) + i])
            kept[1].update(hidden[:, None], hidden[:, None, :, :0])
        for stored in kept:
            stored.length += n
        return hidden

    def _behind(self, i: int, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, n, H] at each new column, layer i - 1's state at the column before; 0 at the first.

        states: [B, n, H] of layer i - 1 at the new columns. lengths: of the sequences before them.
        """
        stored = self.cache.tree_layers[len(self.mtp) + i - 1].storage[0]
        before = [stored[row, 0, max(length - 1, 0)] for row, length in enumerate(lengths)]
        known = torch.tensor(lengths, device=states.device)[:, None] > 0
        first = torch.stack(before) * known
        return torch.cat([first[:, None], states[:, :-1]], dim=1)

    def logits(self, states: Tensor) -> Tensor:
        layer = self.mtp.layer(min(self.level, len(self.mtp) - 1))
        return self.target.output_logits(states, layer.head)
