"""The target drafts over a budget of its own keys and values.

MagicDec (Sadhukhan et al. 2025, 2408.11049). On a long text a forward spends its time on keys and
values rather than on weights. Drafts see a small copy of them: the first few tokens and the latest
(StreamingLLM, Xiao et al. 2024, 2309.17453). All keep their positions in the text.

A sequence of 11 tokens, a budget of 8 with 4 sinks:

    column     0 1 2 3 | 4 5 6  7
    position   0 1 2 3 | 7 8 9 10

With `snapkv` (SnapKV, Li et al. 2024, 2404.14469) the positions that the prompt's last tokens
attended to most take the place of the first few. Each KV head has its own:

    position          0   1   2   3   4   5 | 6   7      the window is 6 and 7
    seen by 6 and 7  .5  .1  .0  .3  .0  .1              two are kept: 0 and 3
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from treespec.draft.drafter import Frontier, Proposer
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.branch import Branch
from treespec.draft.options import SINKS, WINDOW
from treespec.errors import InputError
from treespec.model.attention import NAME, tree_attention
from treespec.model.cache import TreeCache
from treespec.model.masks import together
from treespec.model.target import Target
from treespec.trees.mask import committed

NOTHING, CHOSEN = -1, -2  # a column without a token; one whose token differs by layer and head
WATCHED = "treespec_watched"
POOL = 5  # neighbouring positions whose scores are averaged, as in MagicDec


@dataclass(frozen=True)
class Text:
    """recent: [W] last tokens. chosen: [layers, S, heads] kept positions below `start`; None: the
    first SINKS positions.
    """

    length: int
    recent: Tensor
    start: int = SINKS
    chosen: Tensor | None = None


@final
class SparseProposer(Proposer):
    """Drafts with the target over at most `budget` positions of each text; one text at first.

    window: tokens at a prompt's end that choose the positions kept once the text is longer than the
    budget; None: StreamingLLM's sinks. A cycle copies the keys and values of texts x budget
    positions, each of 2 x layers x KV heads x head width numbers.
    """

    per_text = ("texts",)
    branch: Branch

    def __init__(self, target: Target, budget: int, window: int | None = None) -> None:
        self.target, self.vocab_size = target, target.vocab_size
        self.budget, self.window = budget, window
        self.latest = max(window, budget // 4) if window else budget - SINKS  # positions
        self.texts = [Text(0, torch.empty(0, dtype=torch.int64))]

    @property
    def identity(self) -> object:
        return [self.budget, self.window]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, (text, new) in enumerate(zip(self.texts, tokens, strict=True)):
            prompt = self.window and len(new) - 1 > self.window
            kept = replace(text, start=SINKS, chosen=None) if prompt else text
            recent = torch.cat([text.recent, new[:-1].cpu()])[-(self.window or 1) :]
            self.texts[row] = replace(kept, length=text.length + len(new) - 1, recent=recent)

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, (text, length) in enumerate(zip(self.texts, lengths, strict=True)):
            kept = text if length >= text.start else replace(text, start=SINKS, chosen=None)
            left = max(0, len(text.recent) - (text.length - length))
            self.texts[row] = replace(kept, length=length, recent=text.recent[:left])

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        self._choose(cache)
        positions = torch.full((len(self.texts), min(self.budget, cache.end)), NOTHING)
        for row, text, length in zip(positions, self.texts, cache.lengths, strict=True):
            first = SINKS if text.chosen is None else self.budget - self.latest
            row[:first] = torch.arange(len(row[:first])) if text.chosen is None else CHOSEN
            row[length:] = NOTHING
            start = min(max(text.start, length - self.budget + first), length)
            row[first : first + length - start] = torch.arange(start, length)
        places = positions.where(positions != CHOSEN, 0).to(self.target.output_device)
        self.branch = Branch(self.target, self._copied(cache, positions), cache.lengths, places)
        return list(self.branch.roots(roots))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        return self.branch.extend(frontiers)

    def _choose(self, cache: TreeCache) -> None:
        """Choose the positions that stay for texts that have outgrown the budget."""
        if not self.window:
            return
        due: list[Tensor | None] = []
        for text, length in zip(self.texts, cache.lengths, strict=True):
            outgrown = length > self.budget and text.chosen is None and len(text.recent)
            due.append(text.recent if outgrown else None)
        if all(recent is None for recent in due):
            return
        for row, chosen in enumerate(most_seen(self.target, cache, due, self.budget - self.latest)):
            if chosen is not None:
                start = cache.lengths[row] - len(self.texts[row].recent)
                self.texts[row] = replace(self.texts[row], start=start, chosen=chosen)

    @torch.no_grad()
    def _copied(self, cache: TreeCache, positions: Tensor) -> TreeCache:
        """A cache with these positions [B, C] in its columns."""
        small, (b, c) = self.target.new_cache(), positions.shape
        for i, (layer, source) in enumerate(zip(small.tree_layers, cache.tree_layers, strict=True)):
            if not source.is_initialized:
                continue
            heads = source.storage[0].shape[1]
            index = positions.clamp_min(0)[:, None].repeat(1, heads, 1)  # [B, heads, C]
            for row, text in enumerate(self.texts):
                if text.chosen is not None:
                    index[row, :, : len(text.chosen[i])] = text.chosen[i].T
            index = index.to(source.device)[..., None]
            keys, values = (
                known.gather(2, index.expand(-1, -1, -1, known.shape[-1]))
                for known in source.storage
            )
            layer.update(keys, values)
        small.rewind([c] * b)
        return small


def load_sparse(spec: DrafterSpec, target: Target) -> SparseProposer:
    """`--drafter sparse:512` or `sparse:512,snapkv`. Raises InputError."""
    if target.recurrent:
        raise InputError(
            f"--drafter {spec.own} keeps a part of the keys and values, and layers of "
            f"{type(target.model).__name__} have one state in their place: take another drafter"
        )
    if spec.options.snapkv:
        refuse_what_shows_no_attention(target)
    return SparseProposer(target, spec.options.budget, WINDOW if spec.options.snapkv else None)


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


_forward = threading.local()  # see: the function that gets the attention of this thread's forward


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
    _forward.see((scores + mask[:, :, None]).softmax(-1))
    return tree_attention(module, q, k, v, mask, scaling=scaling, **options)


AttentionInterface.register(WATCHED, watch)
AttentionMaskInterface.register(WATCHED, sdpa_mask)


@contextmanager
def watched(model: PreTrainedModel, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, each layer of a forward hands its attention weights to `see`."""
    _forward.see = see
    try:
        model.set_attn_implementation(WATCHED)
        yield
    finally:
        del _forward.see
        try:
            model.set_attn_implementation(NAME)
        finally:  # repeated, because an interrupt may hit the first
            model.set_attn_implementation(NAME)
