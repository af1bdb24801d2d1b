"""Selects the columns of a text that its last tokens attend to most, for each KV head of each layer.

SnapKV (Li et al. 2024, 2404.14469). The last tokens run once more, as an observation window. A column's score is the
attention that all of them and all query heads of its KV head pay to it, averaged over neighbouring columns. Eight
tokens; the last two are the window, and two others are selected:

    column                     0    1    2    3    4    5  |  6    7
    attention of 6 and 7      .5   .1   .0   .3   .0   .1     .6   .4
    selected without pooling   x              x
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from treespec.errors import InputError
from treespec.model.attention import ATTENTION_NAME, attend_tree
from treespec.model.cache import TreeCache
from treespec.model.masks import pad_and_stack
from treespec.model.target import Target
from treespec.trees.tree import to_device

OBSERVATION_TOKENS = 32  # SnapKV's window_size
POOLING_COLUMNS = 5  # SnapKV's kernel_size
OBSERVED_ATTENTION_NAME = "observed_trees"
ATTENTION_TRIAL_TOKENS = 3

See = Callable[[Tensor], None]


@dataclass(frozen=True)
class SelectedColumns:
    """The selected columns of a text.

    Attributes:
        columns: by layer, [KV heads, N] int64 on the host.
        end: the column after the last of them.
    """

    columns: Sequence[Tensor]
    end: int


@torch.no_grad()
def select_columns(
    target: Target, cache: TreeCache, texts: Sequence[Tensor], count: int, first: int, window: int
) -> list[SelectedColumns]:
    """Selects columns of each text by one forward, which leaves the cache as it was.

    For a moment it holds a layer's attention, [B, heads, observation window, T] in float32. A text that is too short
    gets a selection without meaning.

    Args:
        target: the model.
        cache: of the B texts.
        texts: [T] int64 each, the tokens of the texts, on the host.
        count: columns to select.
        first: columns at the beginning that are not selected.
        window: columns at the end that are not selected; at least 1.
    """
    # 1. The last tokens of each text follow the columns before them once more.
    device = target.output_device
    size = min(OBSERVATION_TOKENS, window)
    tokens = to_device(pad_and_stack([text[-size:] for text in texts]), device)
    size = tokens.shape[1]
    column = torch.arange(cache.end, device=device)
    token_number = torch.arange(size, device=device)
    lengths = to_device(cache.lengths, device)[:, None]
    positions = (lengths - size).clamp_min(0) + token_number
    places = torch.cat([column.expand(len(texts), -1), positions], dim=1)
    causal = (token_number <= token_number[:, None]).expand(len(texts), size, size)

    # 2. The best columns of each layer.
    selectable = (column >= first) & (column < lengths - window)  # [B, end]
    layers: list[Tensor] = []

    def select(weights: Tensor) -> None:
        """weights: [B, KV heads, query heads of each, observation window, T]."""
        allowed = to_device(selectable, weights.device)[:, None]
        scores = weights[..., : cache.end].sum((2, 3)) * allowed
        pooled = avg_pool1d(scores, POOLING_COLUMNS, stride=1, padding=POOLING_COLUMNS // 2)
        pooled = pooled.masked_fill(~allowed, -1.0)
        layers.append(pooled.topk(min(count, cache.end)).indices.cpu())

    with observe_attention(target, select):
        target.forward_nodes(cache, tokens, places, causal)
    selections = []
    for row in range(len(texts)):
        columns = [layer[row] for layer in layers]
        end = 1 + max((int(layer.max()) for layer in columns), default=0)
        selections.append(SelectedColumns(columns, end))
    return selections


observer = threading.local()  # `see`: takes the attention weights of this thread's forward


def attend_and_show(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    **options: Any,
) -> tuple[Tensor, None]:
    """As `attend_tree`, and shows the weights [B, KV heads, query heads of each, N, T] in float32."""
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    grouped = query.float().unflatten(1, (key.shape[1], -1))
    scores = grouped @ key.float()[:, :, None].mT * scale
    observer.see((scores + attention_mask[:, :, None]).softmax(-1))
    return attend_tree(module, query, key, value, attention_mask, **options)


AttentionInterface.register(OBSERVED_ATTENTION_NAME, attend_and_show)
AttentionMaskInterface.register(OBSERVED_ATTENTION_NAME, sdpa_mask)


@contextmanager
def observe_attention(target: Target, see: See) -> Iterator[None]:
    """Inside, each layer of a forward shows its attention weights to `see`, and no graph runs instead."""
    decoder = target.tree_decoder
    graphs = decoder.graphs
    observer.see = see
    try:
        decoder.graphs = None
        set_attention(target, OBSERVED_ATTENTION_NAME)
        yield
    finally:
        set_attention(target, ATTENTION_NAME)
        decoder.graphs = graphs
        del observer.see


def set_attention(target: Target, name: str) -> None:
    """Sets the attention of all layers, by its registered name."""
    decoder = target.model.get_decoder()
    if not hasattr(decoder, "set_attn_implementation"):
        decoder = target.model
    decoder.set_attn_implementation(name)


def check_attention(target: Target) -> None:
    """Raises InputError unless all layers see the whole text and show their attention, by a trial."""
    name = type(target.model).__name__
    if target.tree_decoder.windows.keys() != {"full_attention"}:
        raise InputError(
            f"snapkv is for layers that see the whole text, and some of {name} do not: leave it out"
        )
    layers = 0
    if target.config._attn_implementation == ATTENTION_NAME:
        cache = target.build_cache(ATTENTION_TRIAL_TOKENS)
        text = torch.zeros(ATTENTION_TRIAL_TOKENS, dtype=torch.int64, device="cpu")
        target.prefill(cache, text[None])
        (selection,) = select_columns(target, cache, [text], 1, 0, 1)
        layers = len(selection.columns)
    if layers != target.layers:
        raise InputError(
            f"snapkv selects by attention weights, and {name} does not show those: leave it out"
        )
