"""P-EAGLE (Hui et al. 2026, 2602.01469): EAGLE-3's head that drafts all levels in one forward.

After the last pair the forward has rows whose feature and token are not known yet. Their inputs are a learnt
feature, `mask_hidden`, and the embedding of a mask token m. Each row sees the pairs and the rows before it.
Five tokens, four levels:

    position      0     1     2     3     4    5    6
    token         a     b     c     d     e
    head sees     g0,b  g1,c  g2,d  g3,e  m    m    m
    drafts level                    1     2    3    4      distributions of the tokens after e
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from treespec.heads.eagle3 import Eagle3Head
from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import Angles, Attention, KeyValues
from treespec.heads.llama import BlockHead, Pairs
from treespec.heads.sampled_rows import SampledRows
from treespec.heads.unrolled import AttentionColumns, attend


@final
class PEagleHead(Eagle3Head, BlockHead):
    """P-EAGLE's head. config: EAGLE-3's fields, `levels` and `mask_token_id`. Raises ValueError as `Eagle3Head`."""

    kind: str = "p-eagle"
    known_as: ClassVar[str] = "a P-EAGLE head"

    def __init__(self, config: Config) -> None:
        self.max_depth = int(config["levels"])
        if self.max_depth < 1:
            raise ValueError(f"it drafts {self.max_depth} levels, must be at least 1")
        super().__init__(config)
        self.block = self.max_depth - 1
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.feature_size))

    @classmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        defaults = {"model_type": cls.kind, "levels": 8, "mask_token_id": target.vocab_size - 1}
        return super().build_config(target, **defaults | fields)

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        steps: int,
        embed: Embed | None = None,
        sample: SampledRows | None = None,
    ) -> list[Tensor]:
        """As `Head.forward`. embed: not used. sample: the rows that draft; level 1 is computed of all. None: all."""
        n = counts.shape[1]
        count = min(steps, n, self.max_depth)
        states = []
        for step, level in enumerate(self.compute_levels(tokens, features, count, sample)):
            if sample is None or step == 0:
                wanted = level[counts[:, step:]]
            else:
                wanted = sample.select_wanted(level, counts, step)
            states.append(self.normalize_hidden(wanted))
        return states

    def compute_levels(
        self, tokens: Tensor, features: Tensor, count: int, sample: SampledRows | None = None
    ) -> Sequence[Tensor]:
        """Compute the layers' output of the first `count` levels, from each row at once.

        The rows of all levels lie one after another. Five tokens, three levels:

            row t             0  1  2
            level 1           b  c  d        beside g0 g1 g2, at positions 0 1 2
            level 2           m  m           at positions 1 2, drafts d e
            level 3           m              at position 2, drafts e

        Args:
            tokens: [B, T] int64.
            features: [B, R, F] the target's features at the first R = T - 2 positions.
            count: the number of levels.
            sample: the rows of levels from 2 on; None: all.

        Returns:
            [B, A, H] for each level; level 1 has all R rows, and without a sample level l the first R - l + 1.
        """
        # 1. The rows of each level, their positions and their inputs.
        if not count:
            return []
        texts, n = features.shape[:2]
        every_row = torch.arange(n, device=features.device).expand(texts, -1)
        level_rows = [every_row]
        positions = [every_row]
        widths = [n]
        for level in range(1, count):
            rows = every_row[:, : n - level]
            if sample is not None:
                rows = sample.list_rows(level)
            level_rows.append(rows)
            positions.append(rows + level)
            widths.append(rows.shape[1])
        angles = self.rotary(torch.cat(positions, dim=1), features.dtype)
        mask_tokens = torch.full_like(tokens[:1, :1], self.mask_token)
        mask_features = self.fuse(self.mask_hidden.to(features.dtype))
        mask_row = torch.cat(
            [self.embed_tokens_scaled(mask_tokens, features.dtype), mask_features], -1
        )
        embeddings = self.embed_tokens_scaled(tokens[:, 1 : n + 1], features.dtype)
        pairs = torch.cat([embeddings, self.fuse(features)], dim=-1)
        x = torch.cat([pairs, mask_row.expand(texts, sum(widths[1:]), -1)], dim=1)

        # 2. The layers.
        for layer in self.decoder:
            attend = partial(
                attend_levels,
                layer.self_attn,
                level_rows,
                widths,
                sample is not None,
                angles=angles,
            )
            x = self.call_layer(partial(layer, attend=attend), x)
        if self.norm_output:
            x = self.norm(x)
        return x.split(widths, dim=1)

    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor, Tensor]:
        """As `BlockHead.run`; the block has `max_depth` - 1 rows, because the last pair drafts level 1."""
        # 1. The rows of the block: the mask token and the learnt feature.
        n = pairs.tokens.shape[1]
        size = self.block
        if roots is None:
            size = 0
        tokens = pad(pairs.tokens, (0, size), value=self.mask_token)
        mask_features = self.mask_hidden.to(pairs.features.dtype).expand(len(tokens), size, -1)
        features = self.fuse(torch.cat([pairs.features, mask_features], dim=1))

        # 2. One step of EAGLE-3 over pairs and block; no row sees a later one.
        rows, columns = pairs.seen.shape[1:]
        visible = pairs.seen.tril(columns - rows)[:, None]
        states = self.forward_step(tokens, features, pairs.positions[:, -rows:], visible, caches)
        return states[:, :n], states[:, n:]

    def select_drafted_states(self, last: Tensor, block: Tensor) -> Tensor:
        """As `BlockHead.select_drafted_states`: the last pair's state is level 1."""
        return torch.cat([last[:, None], block], dim=1)


def attend_levels(
    attention: Attention,
    level_rows: Sequence[Tensor],
    widths: list[int],
    sampled: bool,
    x: Tensor,
    angles: Angles,
) -> Tensor:
    """Compute a layer's attention for `PEagleHead.compute_levels`, level by level.

    Row t sees the pairs up to t, and column t of each level from 2 on up to its own. Sampled rows are put where all
    rows would be, with zeros between them: then one causal attention without a mask is enough.

    Args:
        attention: the layer's attention.
        level_rows: for each level its rows [B, A], all R of level 1; samples are nested.
        widths: A of each level.
        sampled: whether the rows of levels from 2 on are sampled; otherwise they are the first ones.
        x: [B, A1 + A2 + …, in] the rows of all levels.
        angles: cos and sin of the rows.

    Returns:
        [B, A1 + A2 + …, H].
    """
    parts = attention.project(x, angles)
    queries = parts.queries.split(widths, dim=2)
    keys = parts.keys.split(widths, dim=2)
    values = parts.values.split(widths, dim=2)
    levels: list[AttentionColumns] = []
    out = []
    for level, rows in enumerate(level_rows):
        if not sampled or level == 0:
            levels.append(AttentionColumns(keys[level], values[level]))
            out.append(attend(queries[level], levels, attention.window))
            continue
        spread = partial(spread_rows, rows=rows, count=widths[0])
        levels.append(AttentionColumns(spread(keys[level]), spread(values[level])))
        attended = attend(spread(queries[level]), levels, attention.window)
        places = rows[:, None, :, None].expand_as(queries[level])
        out.append(attended.gather(2, places))
    return attention.extend(torch.cat(out, dim=2))


def spread_rows(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Put [B, heads, A, D] at their rows [B, A] of [B, heads, count, D], with zeros elsewhere."""
    places = rows[:, None, :, None].expand(x.shape)
    return x.new_zeros(x.shape[0], x.shape[1], count, x.shape[3]).scatter(2, places, x)
