"""The target drafts over a budget of its own keys and values.

MagicDec (Sadhukhan et al. 2025, 2408.11049). On a long text a forward spends its time on keys and
values rather than on weights. Drafts see a small copy of them: the first few tokens and the latest
(StreamingLLM, Xiao et al. 2024, 2309.17453). With `snapkv` the positions that the prompt's last
tokens attended to most take the place of the first few. All keep their positions in the text.

A text of 11 tokens, a budget of 8 with 4 sinks; the next token takes the place of token 7:

    column     0 1 2 3 | 4 5  6  7
    position   0 1 2 3 | 8 9 10  7
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.drafter import Frontier, Proposer
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.branch import Branch
from treespec.draft.models.snapkv import most_seen, refuse_what_shows_no_attention
from treespec.draft.options import SINKS, WINDOW
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.target import Target

NOTHING, CHOSEN = -1, -2  # a column without a token; one whose token differs by layer and head


@dataclass(frozen=True)
class Text:
    """recent: [W] last tokens. chosen: [layers, S, heads] kept positions below `start`; None: the
    first SINKS positions.
    """

    length: int
    recent: Tensor
    start: int = SINKS
    chosen: Tensor | None = None


def columns(length: int, budget: int, first: int, start: int, chosen: bool = False) -> Tensor:
    """[budget] the position in each column: sinks or chosen positions first, then a ring.

    The ring holds the last positions from `start` on. A position never changes its column.
    """
    column, ring = torch.arange(budget), budget - first
    last = length - 1 - (length - 1 - start - (column - first)) % ring
    sinks = torch.full_like(column, CHOSEN) if chosen else column.where(column < length, NOTHING)
    return torch.where(column < first, sinks, last.where(last >= start, NOTHING))


@final
class SparseProposer(Proposer):
    """Drafts with the target over at most `budget` positions of each text; one text at first.

    window: tokens at a prompt's end that choose the positions kept once the text is longer than the
    budget; None: StreamingLLM's sinks. Memory besides the target's: keys and values of texts x
    (budget + drafted nodes), each of 2 x layers x KV heads x head width numbers. A cycle copies the
    newly committed positions; after texts have entered or left, it copies all.
    """

    per_text = ("texts",)

    def __init__(self, target: Target, budget: int, window: int | None = None) -> None:
        self.target, self.vocab_size = target, target.vocab_size
        self.budget, self.window = budget, window
        self.ring = max(window, budget // 4) if window else budget - SINKS  # columns
        self.texts = [Text(0, torch.empty(0, dtype=torch.int64))]
        self.cache: TreeCache | None = None
        self.held = torch.empty(0)  # [B, C] the positions in its columns
        self.branch: Branch | None = None

    @property
    def identity(self) -> object:
        return [self.budget, self.window]

    @property
    def lengths(self) -> list[int]:
        return [text.length for text in self.texts]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, (text, new) in enumerate(zip(self.texts, tokens, strict=True)):
            known = text
            if self.window and len(new) - 1 > self.window:
                known = self._unchosen(row)
            recent = torch.cat([known.recent, new[:-1].cpu()])[-(self.window or 1) :]
            self.texts[row] = replace(known, length=text.length + len(new) - 1, recent=recent)

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            text = self.texts[row] if length >= self.texts[row].start else self._unchosen(row)
            left = max(0, len(text.recent) - (text.length - length))
            self.texts[row] = replace(text, length=length, recent=text.recent[:left])
            if self.cache:
                self.held[row].masked_fill_(self.held[row] >= length, NOTHING)

    def join(self, others: Sequence["SparseProposer"]) -> None:
        super().join(others)
        self.cache = None

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.cache = None

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        self._choose(cache)
        lengths, ring = cache.lengths, self.ring
        wanted = []
        for text, length in zip(self.texts, lengths, strict=True):
            first = SINKS if text.chosen is None else self.budget - ring
            wanted.append(columns(length, self.budget, first, text.start, text.chosen is not None))
        positions = torch.stack(wanted)[:, : min(self.budget, cache.end)]
        small = self._copied(cache, positions)
        places = positions.where(positions != CHOSEN, 0).to(self.target.output_device)
        self.branch = Branch(self.target, small, lengths, places)
        return list(self.branch.roots(roots))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        assert self.branch
        return self.branch.extend(frontiers)

    def _unchosen(self, row: int) -> Text:
        """The text without chosen positions, back to its sinks."""
        text = self.texts[row]
        if text.chosen is not None and self.cache:
            self.held[row] = NOTHING
        return replace(text, start=SINKS, chosen=None)

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
        for row, chosen in enumerate(most_seen(self.target, cache, due, self.budget - self.ring)):
            if chosen is not None:
                start = cache.lengths[row] - len(self.texts[row].recent)
                self.texts[row] = replace(self.texts[row], start=start, chosen=chosen)

    @torch.no_grad()
    def _copied(self, cache: TreeCache, wanted: Tensor) -> TreeCache:
        """The small cache with these positions [B, C] in its columns; copies those it lacks."""
        # 1. Columns that lack their position, as (text, column, position), and texts whose chosen
        # positions are not there.
        b, c = wanted.shape
        if self.cache is None:
            self.cache, self.held = self.target.new_cache(), torch.full((b, 0), NOTHING)
        small = self.cache
        held = pad(self.held, (0, c - self.held.shape[1]), value=NOTHING)
        lacks = (held != wanted) & (wanted != NOTHING)
        row, column = (lacks & (wanted != CHOSEN)).nonzero(as_tuple=True)
        moves = torch.stack([row, column, wanted[row, column]])
        whole = (lacks & (wanted == CHOSEN)).any(1).nonzero().squeeze(1).tolist()

        # 2. Copy them, layer by layer.
        small.reserve(c)
        small.rewind([c] * b)
        for i, (layer, source) in enumerate(zip(small.tree_layers, cache.tree_layers, strict=True)):
            if not source.is_initialized:
                continue
            if not layer.is_initialized:
                layer.lazy_initialization(*source.storage)
            text, to, position = moves.to(source.device)
            for states, known in zip(layer.storage, source.storage, strict=True):
                states[text, :, to] = known[text, :, position]
                for text_row in whole:
                    chosen = self.texts[text_row].chosen
                    assert chosen is not None
                    index = chosen[i].T[..., None].to(known.device).expand(-1, -1, known.shape[-1])
                    states[text_row, :, : len(chosen[i])] = known[text_row].gather(1, index)
        self.held = wanted
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
