"""The target drafts over a budget of its own keys and values.

MagicDec (Sadhukhan et al. 2025, 2408.11049). On a long text a forward spends its time on keys and
values rather than on weights. Drafts see a small copy of them: the first few tokens and the latest
(StreamingLLM, Xiao et al. 2024, 2309.17453). All keep their positions in the text.

A sequence of 11 tokens, a budget of 8 with 4 sinks:

    column     0 1 2 3 | 4 5 6  7
    position   0 1 2 3 | 7 8 9 10

With a window (SnapKV, Li et al. 2024, 2404.14469) the positions that the prompt's last tokens
attended to most take the place of the first few. Each KV head has its own:

    position          0   1   2   3   4   5 | 6   7      the window is 6 and 7
    seen by 6 and 7  .5  .1  .0  .3  .0  .1              two are kept: 0 and 3
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.branch import BranchProposer
from treespec.draft.options import SINKS
from treespec.errors import InputError
from treespec.model.attention import NAME, tree_attention
from treespec.model.cache import TreeCache
from treespec.model.masks import together
from treespec.model.target import Target
from treespec.trees.tree import sent

NOTHING, CHOSEN = 1 << 40, -1  # a column without a token; one whose token differs by layer and head
WATCHED = "treespec_watched"
POOL = 5  # neighbouring positions whose scores are averaged, as in MagicDec


@final
class SparseProposer(BranchProposer):
    """Drafts with the target over at most `budget` positions of each sequence; one at first.

    window: tokens at a prompt's end that choose the positions kept once the sequence is longer than
    the budget; 0: StreamingLLM's sinks. A cycle copies the keys and values of sequences x budget
    positions, each of 2 x layers x KV heads x head width numbers.

    tokens: [T] observed, by sequence. chosen: (start, [layers, S, heads] kept positions below it) by
    sequence; None: the first SINKS positions.
    """

    per_text = ("tokens", "chosen")

    def __init__(self, target: Target, budget: int, window: int = 0) -> None:
        self.model, self.vocab_size = target, target.vocab_size
        self.budget, self.window = budget, window
        self.most = budget - max(window, budget // 4)  # chosen positions
        self.tokens = [torch.empty(0, dtype=torch.int64)]
        self.chosen: list[tuple[int, Tensor] | None] = [None]

    @property
    def identity(self) -> object:
        return [self.budget, self.window]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, new in enumerate(tokens):
            self.tokens[row] = torch.cat([self.tokens[row], new[:-1]])
            if self.window and len(new) - 1 > self.window:
                self.chosen[row] = None  # a prompt chooses again

    def rewind(self, lengths: Sequence[int]) -> None:
        self.tokens = [known[:length] for known, length in zip(self.tokens, lengths, strict=True)]
        pairs = zip(self.chosen, lengths, strict=True)
        self.chosen = [known and (known if known[0] <= length else None) for known, length in pairs]

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        self._choose(cache)
        columns = []
        for known, length in zip(self.chosen, cache.lengths, strict=True):
            first, kept = (known[0], [CHOSEN] * self.most) if known else (SINKS, [*range(SINKS)])
            start = max(first, length - self.budget + len(kept))
            columns.append(torch.tensor([*kept, *range(start, length)][:length], dtype=torch.int64))
        positions = pad_sequence(columns, batch_first=True, padding_value=NOTHING)
        places = sent(positions.where(positions != CHOSEN, 0), self.model.output_device)
        self.follow(self._copied(cache, positions), cache.lengths, places)
        return self.below(roots)

    def _choose(self, cache: TreeCache) -> None:
        """Choose the positions that stay for sequences that have outgrown the budget."""
        pairs = zip(self.chosen, cache.lengths, strict=True)
        due = [known is None and length > self.budget for known, length in pairs]
        if not self.window or not any(due):
            return
        windows = together([known[-self.window :] for known in self.tokens])
        found = most_seen(self.model, cache, windows, self.most)
        for row, chosen in enumerate(found):
            if due[row]:
                self.chosen[row] = cache.lengths[row] - self.window, chosen

    @torch.no_grad()
    def _copied(self, cache: TreeCache, positions: Tensor) -> TreeCache:
        """A cache with these positions [B, C] in its columns."""
        small = self.model.new_cache()
        for i, (layer, source) in enumerate(zip(small.tree_layers, cache.tree_layers, strict=True)):
            if not source.storage:
                continue
            heads, starts = source.storage[0].shape[1], torch.tensor(cache.starts(source.window))
            columns = (positions - starts[:, None]).clamp(0, source.capacity - 1)
            index = columns[:, None].repeat(1, heads, 1)  # [B, heads, C]
            for row, known in enumerate(self.chosen):
                if known:
                    index[row, :, : known[1].shape[1]] = known[1][i].T
            index = sent(index, source.storage[0].device)[..., None]
            layer.update(
                *(
                    kept.gather(2, index.expand(*[-1] * 3, kept.shape[-1]))
                    for kept in source.storage
                )
            )
        small.rewind((positions != NOTHING).sum(1).tolist())
        return small


def load_sparse(spec: DrafterSpec, target: Target) -> SparseProposer:
    """`--drafter sparse:512` or `sparse:512,window=32`. Raises InputError."""
    if target.recurrent:
        raise InputError(
            f"--drafter {spec.own} keeps a part of the keys and values, and layers of "
            f"{type(target.model).__name__} have one state in their place: take another drafter"
        )
    if spec.options.window:
        refuse_what_shows_no_attention(target)
    return SparseProposer(target, spec.options.budget, spec.options.window)


def refuse_what_shows_no_attention(target: Target) -> None:
    """Raise InputError unless all layers see the whole text and the attention is sdpa."""
    name = type(target.model).__name__
    if target.windows.keys() != {"full_attention"}:
        raise InputError(
            f"a window is for layers that see the whole text, some of {name} do not: take sparse:N"
        )
    if target.config._attn_implementation != NAME:
        raise InputError(f"a window reads the attention of sdpa, {name} has another: take sparse:N")


@torch.no_grad()
def most_seen(target: Target, cache: TreeCache, windows: Tensor, keep: int) -> Tensor:
    """[B, layers, keep, KV heads] int64 positions before each window that its tokens attend to most.

    windows: [B, W] the last committed tokens of each sequence; what a shorter one gets means nothing.
    It runs one forward over the windows and leaves the cache unchanged. For a moment it holds the
    attention of a layer, [B, heads, W, T] in float32.
    """
    # 1. What each token of the windows sees.
    device, (b, w) = target.output_device, windows.shape
    column, row = torch.arange(cache.end, device=device), torch.arange(w, device=device)
    starts = torch.tensor(cache.lengths, device=device)[:, None].sub(w).clamp_min(0)
    earlier = column < starts  # [B, end]
    causal = (row <= row[:, None]).expand(b, w, w)
    places = torch.cat([column.expand(b, -1), starts + row], dim=1)

    # 2. In each layer the positions with the most attention.
    best: list[Tensor] = []

    def choose(weights: Tensor) -> None:
        """weights: [B, key-value heads, group, W, T]."""
        score = weights[..., : cache.end].sum((2, 3))  # [B, heads, end]
        score = F.avg_pool1d(score, POOL, stride=1, padding=POOL // 2)
        score = score.masked_fill(~earlier.to(score.device)[:, None], -1.0)
        best.append(score.topk(min(keep, cache.end)).indices.mT.cpu())  # [B, keep, heads]

    with watched(target.model, choose):
        target.forward_nodes(cache, windows.to(device), places, causal)
    return torch.stack(best, dim=1)


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
