"""Count the memory of a training step's layers for heads that draft blocks, in GB, without computing them.

The tensors are on the meta device, so that any size fits. Attention is the fused kernel's: it keeps its inputs,
its output and a number a row. The step is forward and backward of a conversation. The loss is by its own bound:
a chunk of logits, the states and their gradients, and the gradient of the output layer.
"""

import weakref
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import typer
from measure import show
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from treespec.draft.heads.loading import MAX_BLOCK_ROWS
from treespec.heads.registry import HEAD_KINDS
from treespec.heads.sampled_rows import SampledRows
from treespec.train.budget import PUBLISHED_AUX_LAYERS, spread_aux_layers
from treespec.train.config import DRAFT_VOCAB
from treespec.train.data.anchors import RowSampling, draw_rows
from treespec.train.loop.run import DRAFT_STEPS
from treespec.train.losses.tokens import CHUNK_LOGITS_ELSEWHERE

VOCAB = 151_936
LAYERS = 36
LAYERS_OF_HEADS = {"dflash": 5, "p-eagle": 4}  # as published
P_EAGLE_LEVELS = 8
STATE_BYTES = 16  # of a parameter: weight, gradient and AdamW's two moments in float32
LOSS_ROW_BYTES = 36  # of a chunk's logit (`treespec.train.losses.tokens.choose_chunk_rows`)


@dataclass
class Facts:
    """A target's facts, of Qwen 3 8B."""

    config: Any
    feature_width: int = 4096
    vocab_size: int = VOCAB
    layers: int = LAYERS
    embed_scale: float = 1.0


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made inside that are alive: `now`, the `peak` so far, and those `kept` for later."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.kept = 0
        self.peak = 0
        self.counted: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        inputs = {
            x.untyped_storage()._cdata for x in tree_leaves(arguments) if isinstance(x, Tensor)
        }
        results = function(*arguments, **(options or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs | self.counted:
                    self.now += storage.nbytes()
                    self.counted.add(storage._cdata)
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return results

    def free(self, key: int, size: int) -> None:
        """Stop counting a storage that was freed."""
        self.now -= size
        self.counted.discard(key)


def attend_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Stand for scaled_dot_product_attention: a fused kernel on the meta device; a mask becomes numbers to add."""
    if mask is not None:
        mask = torch.empty_like(mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = kernel(query, key, value, dropout, is_causal, attn_mask=mask, scale=scale)[0]
    return out


def build_head(kind: str, levels: int, layers: int) -> Any:
    """Build a head for the 8 B target on the meta device."""
    shape = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    target = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=VOCAB, num_hidden_layers=LAYERS)
    fields: dict[str, Any] = {"levels": levels, "num_hidden_layers": layers}
    fields["draft_vocab_size"] = DRAFT_VOCAB
    if kind != "p-eagle":
        fields["aux_hidden_state_layer_ids"] = spread_aux_layers(LAYERS, PUBLISHED_AUX_LAYERS)
    head_class = HEAD_KINDS[kind].build()
    with torch.device("meta"):
        return head_class(head_class.build_config(Facts(target), **fields))


def count_bytes(
    head: Any, tokens: int, sample: SampledRows | None, recompute: bool | None
) -> LiveBytes:
    """Count a step of a head over a conversation: what it keeps for the backward pass (`kept`), and its peak."""
    head.recompute = recompute
    text = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    features = torch.empty(1, tokens - 2, head.feature_size, device="meta")
    live = LiveBytes()
    with patch.object(F, "scaled_dot_product_attention", attend_fused), live:
        if head.kind == "p-eagle":
            levels = head.compute_levels(text, features, head.max_depth, sample)
        else:
            levels = head.compute_levels(text, features, head.embed_tokens, sample)
        total = torch.cat([level.flatten() for level in levels]).sum()
        live.kept = live.now
        total.backward()
    return live


def count_validation_peak(kind: str, tokens: int, levels: int, rows_at_once: int) -> int:
    """Count the peak of a validation of a head over a conversation, in bfloat16, in parts of that many block rows."""
    head = build_head(kind, levels, LAYERS_OF_HEADS[kind]).to(torch.bfloat16)
    text = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    rows = tokens - 2
    features = torch.empty(1, rows, head.feature_size, dtype=torch.bfloat16, device="meta")
    live = LiveBytes()
    size = rows_at_once // head.block
    parts: list[list[Tensor]] = []
    with patch.object(F, "scaled_dot_product_attention", attend_fused), torch.no_grad(), live:
        for first in range(0, rows, size):
            anchors: SampledRows | None = None
            if size < rows:
                end = min(first + size, rows)
                anchors = SampledRows.from_range(first, end, rows, levels).to_device(text.device)
            if kind == "p-eagle":
                computed = head.compute_levels(text, features, DRAFT_STEPS, anchors)
            else:
                computed = head.compute_levels(text, features, head.embed_tokens, anchors)
            parts.append([level.clone() for level in computed[:DRAFT_STEPS]])
        for level in zip(*parts, strict=True):
            torch.cat(level, dim=1)
    return live.peak


def main(
    tokens: int = 8192, anchors: str = "0,512,3072", ratios: str = "1,0.7", levels: int = 15
) -> None:
    """Print the table: DFlash by anchors (0: all), P-EAGLE of eight levels by its ratio (1: all)."""
    mask = torch.ones(tokens, dtype=torch.bool, device="cpu")
    cases = [("dflash", RowSampling(levels, anchors=int(count))) for count in anchors.split(",")]
    cases += [
        ("p-eagle", RowSampling(P_EAGLE_LEVELS, ratio=float(ratio))) for ratio in ratios.split(",")
    ]
    rows = []
    for kind, sampling in cases:
        head = build_head(kind, sampling.levels, LAYERS_OF_HEADS[kind])
        sample: SampledRows | None = None
        name = f"{kind}, every row"
        if sampling.anchors or sampling.ratio < 1:
            sample = draw_rows(mask, sampling, 0, 0).to_device(torch.device("meta"))
            name = f"{kind}, {sampling.anchors or sampling.ratio:,}"
        parameters = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
        widths = [tokens - 2] * sampling.levels
        if sample is not None:
            widths = list(sample.widths)
        states = 4 * head.hidden_size * sum(widths)
        output = 4 * head.lm_head.weight.numel()
        loss = CHUNK_LOGITS_ELSEWHERE * LOSS_ROW_BYTES + 2 * states + output
        sizes = []
        for recompute in (False, True):
            live = count_bytes(head, tokens, sample, recompute)
            sizes += [live.kept, live.peak]
        rows.append(
            [name, *(f"{size / 1e9:.1f}" for size in [*sizes, loss, STATE_BYTES * parameters])]
        )
    show(
        [
            "rows that draft",
            "kept",
            "peak",
            "kept, recomputed",
            "peak, recomputed",
            "loss",
            "weights, AdamW",
        ],
        rows,
    )
    rows = []
    for kind, its_levels in (("dflash", levels), ("p-eagle", P_EAGLE_LEVELS)):
        for name, rows_at_once in (("every row", 32 * tokens), ("in parts", MAX_BLOCK_ROWS)):
            peak = count_validation_peak(kind, tokens, its_levels, rows_at_once)
            rows.append([f"{kind}, {name}", f"{peak / 1e9:.1f}"])
    show(["validation", "peak"], rows)


if __name__ == "__main__":
    typer.run(main)
