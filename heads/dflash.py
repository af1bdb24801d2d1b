"""DFlash (Chen et al. 2026, 2602.06036): one forward fills in a block of mask tokens.

The target's features at aux layers, fused by `fc`, become keys and values in every layer of the
head; they have no queries. The block is the sequence's last token and mask tokens m after it; its rows
see each other. Five tokens, a block of four:

    position      0    1    2    3    4    5    6    7
    token         a    b    c    d    e    m    m    m
    keys from     g0   g1   g2   g3   the block's own rows
    drafts level                           1    2    3       distributions of the tokens after e

With `sample_from_anchor` each row drafts the token after its own position, so the block of four
drafts four levels.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from treespec.heads.anchors import attend_anchors, build_slot_masks
from treespec.heads.eagle3 import check_distinct_layers, list_default_aux_layers
from treespec.heads.head import Config, Embed, TargetFacts
from treespec.heads.layers import (
    Angles,
    Attend,
    Attention,
    KeyValues,
    Layer,
    RMSNorm,
    list_layer_windows,
)
from treespec.heads.llama import BlockHead, Pairs
from treespec.heads.sampled_rows import SampledRows
from treespec.heads.unrolled import AttentionColumns, attend


class BlockRows(NamedTuple):
    """The blocks whose rows a layer computes.

    Attributes:
        roots: [B] or [B, R] the last token before each block; None: no blocks.
        slots: S of rows [S B, R, H], slot after slot; 0: rows are [B, S, H].
    """

    roots: Tensor | None
    slots: int = 0

    def split(self, x: Tensor) -> Tensor:
        """Turn rows into [S, B, H], or [S, B, R, H]."""
        if self.slots:
            return x.unflatten(0, (self.slots, -1))
        return x.transpose(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Turn what `split` returns back into rows."""
        if self.slots:
            return x.flatten(0, 1)
        return x.transpose(0, 1)


class DFlashHead(BlockHead):
    """DFlash's head, with the published parameter names.

    config: Llama's fields for Qwen3's layers, and
    - `aux_hidden_state_layer_ids`, `mask_token_id`, `block_size`.
    - `sample_from_anchor` (false if absent): whether the last token's row drafts too.
    - `layer_types` and `sliding_window`, as for `Eagle3Head`.
    - `causal`: for each layer, whether a block row sees no later block rows. If absent, layers with a
      window are causal.
    - `own_output` (false if absent): whether the head has its own output layer for `draft_vocab_size`
      tokens, with d2t and t2d as in EAGLE-3. Otherwise it uses the target's.

    Attributes:
        embed_tokens: None if the checkpoint has none: the head uses the target's embedding then.
        from_anchor: `sample_from_anchor`.
        windows: the window of each layer.
    """

    kind: str = "dflash"
    known_as: ClassVar[str] = "a DFlash head"

    def __init__(self, config: Config) -> None:
        # 1. Read the config.
        super().__init__(config)
        width = self.hidden_size
        eps = self.llama.rms_norm_eps
        self.aux_layers = check_distinct_layers(config["aux_hidden_state_layer_ids"])
        self.block = config.get("block_size") or 0
        self.from_anchor = config.get("sample_from_anchor")
        self.max_depth = self.block - self.first_slot
        if self.max_depth < 1:
            raise ValueError(f"block_size is {self.block}, must be at least 2")
        self.windows = list_layer_windows(config)
        self.causal: list[bool] = [window is not None for window in self.windows]
        if config.get("causal"):
            self.causal = config["causal"]
        self.cached_layers = len(self.windows)

        # 2. Build the modules, by their published names.
        self.feature_size = len(self.aux_layers) * (config.get("target_hidden_size") or width)
        self.fc = nn.Linear(self.feature_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.norm = RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(Layer(self.llama, qk_norm=True) for _ in self.windows)
        if config.get("own_output"):
            self.draft_first(config.get("draft_vocab_size"))

    @classmethod
    def build_config(cls, target: TargetFacts, levels: int = 7, **fields: Any) -> Config:
        defaults = {
            "model_type": cls.kind,
            "aux_hidden_state_layer_ids": list(list_default_aux_layers(target.layers)),
            "block_size": levels + 1,
            "mask_token_id": target.vocab_size - 1,
            "target_hidden_size": target.config.hidden_size,
            "own_output": True,
        }
        return super().build_config(target, **defaults | fields)

    @property
    def first_slot(self) -> int:
        """The first row of a block that drafts: 0, the last token's, or 1, the first mask token's."""
        if self.from_anchor:
            return 0
        return 1

    def embed_block(self, tokens: Tensor, embed: Embed) -> Tensor:
        """Embed the tokens [...] of blocks, by the head's embedding or else the target's -> [..., H]."""
        if self.embed_tokens is None:
            return embed(tokens)
        embedded: Tensor = self.embed_tokens(tokens)
        return embedded

    def run(
        self, pairs: Pairs, roots: Tensor | None, caches: Sequence[KeyValues], embed: Embed
    ) -> tuple[Tensor, Tensor]:
        """As `BlockHead.run`; the first result is the context itself, because pairs have no rows."""
        # 1. The context (fused features) that every layer reads, and the rows of the block.
        context = self.hidden_norm(self.fc(pairs.features))
        x = context[:, :0]
        rows = pairs.seen.shape[1]
        if roots is not None:
            block = F.pad(roots[:, None], (0, self.block - 1), value=self.mask_token)
            x = self.embed_block(block, embed).to(context.dtype)
        angles = self.rotary(pairs.positions[:, -rows:], context.dtype)
        blocks = BlockRows(roots)

        # 2. The layers. Without a block they only store the keys and values of the context.
        for number, (module, cache) in enumerate(zip(self.layers, caches, strict=True)):
            layer = cast(Layer, module)
            mask = self._mask(number, pairs, x.shape[1])
            attention = partial(
                layer.self_attn, angles=angles, mask=mask, cache=cache, context=context
            )
            x = self.apply_layer(number, x, attention, blocks)
        return context, self.finish(x, blocks)

    def apply_layer(self, number: int, x: Tensor, attend: Attend, blocks: BlockRows) -> Tensor:
        """Compute a layer's rows. attend: its attention, with all but the rows bound."""
        rows: Tensor = self.layers[number](x, attend)
        return rows

    def finish(self, x: Tensor, blocks: BlockRows) -> Tensor:
        """Turn the last layer's rows into the block's states [..., H]."""
        return self.norm(x)

    def forward(
        self,
        tokens: Tensor,
        features: Tensor,
        counts: Tensor,
        steps: int,
        embed: Embed,
        anchors: SampledRows | None = None,
    ) -> list[Tensor]:
        """As `Head.forward`; a step is a level of the block. anchors: the rows at which blocks start; None: all."""
        n = counts.shape[1]
        levels = self.compute_levels(tokens, features, embed, anchors)
        states = []
        for step, level in enumerate(levels[: min(steps, n)]):
            if anchors is None:
                states.append(level[:, : n - step][counts[:, step:]])
            else:
                states.append(anchors.select_wanted(level, counts, step))
        return states

    def compute_levels(
        self, tokens: Tensor, features: Tensor, embed: Embed, anchors: SampledRows | None = None
    ) -> Sequence[Tensor]:
        """Compute the states of all levels, of a block that starts at each of R rows, or of A anchors.

        A slot is the same place in all blocks, and a layer computes it as
        one sequence of R rows: row t attends to the context up to t, and to column t of each slot. Five
        tokens, a block of three:

            row t             0  1  2
            slot 0            b  c  d        at positions 1 2 3
            slot 1            m  m  m        at positions 2 3 4, drafts level 1: c d e
            slot 2            m  m  m        at positions 3 4 5, drafts level 2: d e

        Args:
            tokens: [B, T] int64.
            features: [B, R, F] the target's features at the first R = T - 2 positions.
            embed: the target's embedding.
            anchors: the rows at which blocks start; None: all.

        Returns:
            [B, R, H] for each level, or [B, A, H].
        """
        # 1. Positions and rows of all slots, [S B, R, …].
        context = self.hidden_norm(self.fc(features))
        size = self.block
        dtype = features.dtype
        texts, n = features.shape[:2]
        context_positions = torch.arange(n, device=tokens.device)
        rows = context_positions.expand(texts, -1)
        if anchors is not None:
            rows = anchors.list_rows(0)
        roots = tokens.gather(1, rows + 1)
        x = torch.cat([roots, torch.full_like(roots, self.mask_token).repeat(size - 1, 1)])
        x = self.embed_block(x, embed).to(dtype)
        slots = torch.arange(1, size + 1, device=tokens.device).repeat_interleave(texts)
        angles = self.rotary(rows.repeat(size, 1) + slots[:, None], dtype)
        context_angles = self.rotary(context_positions, dtype)

        # 2. The layers.
        blocks = BlockRows(roots, slots=size)
        masks: dict[tuple[bool, int | None], list[Tensor]] = {}
        for number in range(self.cached_layers):
            window = self.windows[number]
            span = (self.causal[number], window)
            if anchors is not None and span not in masks:
                masks[span] = build_slot_masks(rows, n, size, self.causal[number], window)
            compute = partial(
                self.compute_layer,
                number,
                context,
                context_angles,
                masks.get(span),
                angles=angles,
                blocks=blocks,
            )
            x = self.call_layer(compute, x)

        # 3. The slots that draft.
        return self.finish(x, blocks).chunk(size)[self.first_slot :]

    def compute_layer(
        self,
        number: int,
        context: Tensor,
        context_angles: Angles,
        masks: Sequence[Tensor] | None,
        x: Tensor,
        angles: Angles,
        blocks: BlockRows,
    ) -> Tensor:
        """Compute a layer for `compute_levels`.

        Args:
            number: of the layer.
            context: [B, R, H] the fused features.
            context_angles: cos and sin of the context.
            masks: of `build_slot_masks`; None: blocks start at all rows.
            x: [S B, A, H] the rows of all slots, slot after slot.
            angles: cos and sin of the rows.
            blocks: the blocks.
        """
        attention = cast(Layer, self.layers[number]).self_attn
        parts = attention.project(context, context_angles)
        columns = AttentionColumns(parts.keys, parts.values)
        if masks is not None:
            attend = partial(attend_anchors, attention, columns, masks, angles=angles)
        else:
            attend = partial(
                attend_blocks,
                attention,
                columns,
                angles=angles,
                causal=self.causal[number],
                window=self.windows[number],
            )
        return self.apply_layer(number, x, attend, blocks)

    def _mask(self, number: int, pairs: Pairs, size: int) -> Tensor:
        """Build the mask [B, 1, S, T] of the block's rows in a layer, by its causality and window."""
        columns = pairs.seen.shape[2]
        window = self.windows[number]
        first = columns - size
        visible = pairs.seen[:, pairs.seen.shape[1] - size :]
        if self.causal[number]:
            visible = visible.tril(first)
        if window is not None:
            visible = visible & (
                pairs.positions[:, None] > pairs.positions[:, first:, None] - window
            )
        return visible[:, None]

    def select_drafted_states(self, last: Tensor, block: Tensor) -> Tensor:
        """As `BlockHead.select_drafted_states`: all drafts are states of the block."""
        return block[:, self.first_slot :]


def attend_blocks(
    attention: Attention,
    context: AttentionColumns,
    x: Tensor,
    angles: Angles,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Compute a layer's attention for `DFlashHead.forward`, slot by slot.

    Args:
        attention: the layer's attention.
        context: keys and values [B, kv heads, R, D] of the fused features.
        x: [S B, R, H] the rows of all slots, slot after slot.
        angles: cos and sin of the rows.
        causal: whether a slot sees no later slots.
        window: the number of positions that a row sees, its own included; None: all.

    Returns:
        [S B, R, H].
    """
    # 1. Queries, keys and values of each slot.
    size = len(x) // len(context.keys)
    parts = attention.project(x, angles)
    queries = parts.queries.chunk(size)
    slots = [
        AttentionColumns(keys, values)
        for keys, values in zip(parts.keys.chunk(size), parts.values.chunk(size), strict=True)
    ]

    # 2. Row t sees the context up to t, and column t of each slot.
    out = []
    for number, rows in enumerate(queries, start=1):
        seen_slots = slots
        if causal:
            seen_slots = slots[:number]
        slot_window = window
        if slot_window is not None:
            # Later slots do not use up the window of an earlier one.
            slot_window += len(seen_slots) - number
        out.append(attend(rows, [context] + seen_slots, slot_window))
    return attention.extend(torch.cat(out))
