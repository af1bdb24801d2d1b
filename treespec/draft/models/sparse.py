"""The target drafts over a sparse cache of constant size, a copy of some columns of its own (`--drafter sparse`).

MagicDec (Chen et al. 2024, 2408.11049). After a long text a forward spends its time on keys and values, not on
weights. Drafts see the first tokens, which are attention sinks, and a window of the latest ones (StreamingLLM, Xiao
et al. 2023, 2309.17453). With SnapKV (`treespec.draft.models.snapkv`) they also see the tokens that the prompt's last
ones attend to most; each KV head has its own. Seven tokens, with 1 sink, 2 selected tokens and a window of 3:

    text            a b c d e f g          the new tokens x and y follow, and the window moves on
    KV head 0       a | b d | e f g        a | b d | g x y
    KV head 1       a | c d | e f g        a | c d | g x y

Keys keep the positions that their tokens have in the text. StreamingLLM numbers the columns of its cache instead,
because its texts are longer than those of the model's training. A target's texts are not.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treespec.draft.drafter import PREFILL_AT
from treespec.draft.models.branch import BranchProposer
from treespec.draft.models.snapkv import SelectedColumns, check_attention, select_columns
from treespec.draft.registry import SparseOptions
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.cache_rows import CacheRow
from treespec.model.target import Target
from treespec.trees.tree import to_device

NO_TOKEN = 1 << 40  # position of a padding column, which no node sees


@dataclass(frozen=True)
class SparseText:
    """A sequence that is drafted over a sparse cache.

    Attributes:
        tokens: [T] int64 observed, on the host.
        selection: the columns that SnapKV has selected; None: none yet.
    """

    tokens: Tensor
    selection: SelectedColumns | None = None


@final
class SparseProposer(BranchProposer):
    """Drafts with the target over some columns of its cache; one sequence at first.

    Each cycle copies the columns of all sequences to a cache of its own, and writes the drafted levels after them.

    Attributes:
        states: the sequences.
        cache: the sparse cache.
    """

    states: list[SparseText]

    def __init__(self, target: Target, options: SparseOptions) -> None:
        self.model = target
        self.options = options
        self.vocab_size = target.vocab_size
        self.cache = target.build_cache()
        self.states = [SparseText(torch.empty(0, dtype=torch.int64, device="cpu"))]

    def new(self) -> "SparseProposer":
        return SparseProposer(self.model, self.options)

    @property
    def row_holders(self) -> list[TreeCache]:
        return [self.cache]

    @property
    def size(self) -> int:
        """The number of a sequence's columns in the sparse cache, if the text is long enough."""
        options = self.options
        return options.sinks + options.snapkv + options.window

    @property
    def identity(self) -> object:
        return ["sparse", vars(self.options)]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, new_tokens in enumerate(tokens):
            text = self.states[row]
            selection = text.selection
            if len(new_tokens) - 1 > PREFILL_AT:
                selection = None  # the end of a prompt selects again
            self.states[row] = SparseText(torch.cat([text.tokens, new_tokens[:-1]]), selection)

    def rewind(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            text = self.states[row]
            selection = text.selection
            if selection and selection.end > length - self.options.window:
                selection = None
            self.states[row] = SparseText(text.tokens[:length], selection)

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        if self.options.snapkv:
            self._select(cache)
        positions = self._copy_columns(cache)
        self.follow(self.cache)
        self.places = to_device(positions, self.model.output_device)
        self.after = to_device(cache.lengths, self.model.output_device)[:, None]
        return self.extend_roots(roots)

    def _select(self, cache: TreeCache) -> None:
        """Selects columns of the texts that have outgrown the sparse cache, and have none yet."""
        options = self.options
        due_rows = []
        for row, length in enumerate(cache.lengths):
            if length > self.size and self.states[row].selection is None:
                due_rows.append(row)
        if not due_rows:
            return
        texts = [state.tokens for state in self.states]
        selections = select_columns(
            self.model, cache, texts, options.snapkv, options.sinks, options.window
        )
        for row in due_rows:
            self.states[row] = replace(self.states[row], selection=selections[row])

    def list_positions(self, length: int) -> Tensor:
        """Returns [C] int64 the position in each column of a sequence; 0 in columns that SnapKV selects."""
        if length <= self.size:
            return torch.arange(length, device="cpu")
        first = torch.arange(self.options.sinks, device="cpu")
        selected = torch.zeros(self.options.snapkv, dtype=torch.int64, device="cpu")
        latest = torch.arange(length - self.options.window, length, device="cpu")
        return torch.cat([first, selected, latest])

    @torch.no_grad()
    def _copy_columns(self, cache: TreeCache) -> Tensor:
        """Copies columns of the target's cache to the sparse one. Returns their positions [B, C]."""
        # 1. The position in each column.
        position_rows = list(map(self.list_positions, cache.lengths))
        positions = pad_sequence(position_rows, batch_first=True, padding_value=NO_TOKEN)

        # 2. The entries of flattened keys and values that hold them. Layers with a window lack earlier positions,
        #    which no node sees there. Without a selection, layers of equal shape, window and device share one index.
        has_selection = any(state.selection for state in self.states)

        @functools.cache
        def index_entries(
            window: int | None, device: torch.device, heads: int, capacity: int, layer: int
        ) -> Tensor:
            firsts = torch.tensor(
                cache.list_first_positions(window), dtype=torch.int64, device="cpu"
            )
            columns = (positions - firsts[:, None]).clamp(0, capacity - 1)
            columns = columns[:, None].repeat(1, heads, 1)
            if has_selection:
                self._insert_selections(columns, layer)
            head_numbers = torch.arange(len(columns) * heads, device="cpu").view(-1, heads, 1)
            return to_device((head_numbers * capacity + columns).flatten(), device)

        # 3. The copy.
        sparse = self.cache
        sparse.rewind([0] * len(position_rows))
        for number, layer in enumerate(sparse.tree_layers):
            source = cache.tree_layers[number]
            copies = []
            for states in source.storage:
                batch, heads, capacity, _ = states.shape
                layer_number = number if has_selection else 0
                index = index_entries(source.window, states.device, heads, capacity, layer_number)
                entries = states.flatten(0, 2).index_select(0, index)
                copies.append(entries.unflatten(0, (batch, heads, -1)))
            if copies:
                layer.update(*copies)

        # 4. The rows hold these columns, with what else the forward depends on.
        rows = []
        for row, held in zip(cache.rows, position_rows, strict=True):
            rows.append(CacheRow([], row.now._replace(length=len(held), base=0, tokens=None)))
        sparse.rows = rows
        sparse.write_after(0)
        return positions

    def _insert_selections(self, columns: Tensor, layer: int) -> None:
        """Writes the selected columns of a layer behind the sinks. columns: [B, KV heads, C]."""
        first = self.options.sinks
        for row, state in enumerate(self.states):
            if state.selection:
                selected = state.selection.columns[layer]
                columns[row, :, first : first + self.options.snapkv] = selected


def load_sparse(spec: DrafterSpec, target: Target) -> SparseProposer:
    """Loads the drafter of `--drafter sparse` or `sparse:window=512,snapkv=256`. Raises InputError."""
    name = type(target.model).__name__
    if target.tree_decoder.recurrent:
        raise InputError(
            f"--drafter {spec.own} drafts over some columns of keys and values, and layers of {name} "
            "carry one state instead: take another drafter"
        )
    if spec.options.snapkv:
        check_attention(target)
    return SparseProposer(target, spec.options)
