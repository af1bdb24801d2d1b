"""SnapKV (Li et al. 2024, 2404.14469): which positions of a text a budget of keys and values keeps.

A forward over a prompt's last tokens shows what they attend to. Each KV head keeps the positions
with the most attention:

    position          0   1   2   3   4   5 | 6   7      the window is 6 and 7
    seen by 6 and 7  .5  .1  .0  .3  .0  .1              two are kept: 0 and 3
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from treespec.errors import InputError
from treespec.model.attention import NAME, tree_attention
from treespec.model.cache import TreeCache
from treespec.model.masks import together
from treespec.model.target import Target
from treespec.trees.mask import committed

WATCHED = "treespec_watched"
POOL = 5  # neighbouring positions whose scores are averaged, as in MagicDec


def refuse_what_shows_no_attention(target: Target) -> None:
    """Raise InputError unless all layers see the whole text and the attention is sdpa."""
    name = type(target.model).__name__
    if target.windows.keys() != {"full_attention"}:
        raise InputError(
            f"snapkv is for layers that see the whole text, some of {name} do not: take sparse:N"
        )
    if target.config._attn_implementation != NAME:
        raise InputError(f"snapkv reads the attention of sdpa, {name} has another: take sparse:N")


@torch.no_grad()
def most_seen(
    target: Target, cache: TreeCache, recent: Sequence[Tensor | None], keep: int
) -> list[Tensor | None]:
    """For each text [layers, keep, KV heads] int64 positions before its window; None without one.

    recent: each text's window, its last committed tokens [W]. It runs one forward over the windows
    and leaves the cache unchanged. For a moment it holds the attention of a layer, [B, heads, W, T]
    in float32.
    """
    # 1. The windows, padded, and what each of their tokens sees.
    nothing = torch.zeros(1, dtype=torch.int64)
    windows = [nothing if tokens is None else tokens for tokens in recent]
    tokens = together([window.to(target.output_device) for window in windows])  # [B, W]
    sizes = [len(window) for window in windows]
    before = [max(0, length - size) for length, size in zip(cache.lengths, sizes, strict=True)]
    b, w = tokens.shape
    device = tokens.device
    column = torch.arange(cache.end, device=device)
    earlier = column < torch.tensor(before, device=device)[:, None]  # [B, end]
    causal = torch.ones(w, w, dtype=torch.bool, device=device).tril().expand(b, w, w)
    seen = torch.cat([earlier[:, None].expand(b, w, -1), causal], dim=2)
    own = torch.tensor(before, device=device)[:, None] + torch.arange(w, device=device)
    places = torch.cat([column.expand(b, -1), own], dim=1)

    # 2. In each layer the positions with the most attention.
    looks = committed(sizes, device)[:, 0]  # [B, W] tokens that are not padding
    best: list[Tensor] = []

    def choose(weights: Tensor) -> None:
        """weights: [B, key-value heads, group, W, T]."""
        mine = looks.to(weights.device)[:, None, None, :, None]
        score = (weights[..., : cache.end] * mine).sum((2, 3))  # [B, heads, end]
        score = F.avg_pool1d(score, POOL, stride=1, padding=POOL // 2)
        score = score.masked_fill(~earlier.to(score.device)[:, None], -1.0)
        chosen = score.topk(min(keep, cache.end), dim=-1).indices  # [B, heads, keep]
        best.append(chosen.transpose(1, 2).cpu())

    with watched(target.model, choose):
        target.forward_nodes(cache, tokens, places, seen)
    positions = torch.stack(best, dim=1)  # [B, layers, keep, heads]
    return [None if window is None else positions[row] for row, window in enumerate(recent)]


class Seeing(threading.local):
    """The function that gets the attention weights of this thread's forward."""

    see: Callable[[Tensor], None]


_now = Seeing()


def watch(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The attention of a layer, whose weights go to `see`. It is called as transformers' are."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # [B, heads, group, W, D]
    scores = grouped @ k.float()[:, :, None].mT * (scaling or q.shape[-1] ** -0.5)
    _now.see((scores + mask[:, :, None]).softmax(-1))
    return tree_attention(module, q, k, v, mask, scaling=scaling, **options)


AttentionInterface.register(WATCHED, watch)
AttentionMaskInterface.register(WATCHED, sdpa_mask)


@contextmanager
def watched(model: PreTrainedModel, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, each layer of a forward hands its attention weights to `see`."""
    _now.see = see
    try:
        model.set_attn_implementation(WATCHED)
        yield
    finally:
        del _now.see
        try:
            model.set_attn_implementation(NAME)
        finally:  # repeated, because an interrupt may hit the first
            model.set_attn_implementation(NAME)
