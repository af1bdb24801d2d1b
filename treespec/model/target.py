"""Any transformers decoder as the target: one forward scores a whole tree.

No model code is copied: `treespec.model.tree_decoder` carries the tree through the model's own decoder. A model
that cannot score a tree is refused. After loading, a small tree's logits are checked against the plain model's.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespec.errors import InputError, get_first_line
from treespec.model.adapters import unwrap_adapter
from treespec.model.cache import TreeCache
from treespec.model.cpu.packed_layers import PackedLinear
from treespec.model.cuda_graphs import build_graphs
from treespec.model.masks import pad_trees, unpad_rows
from treespec.model.output import OutputPath, TreeOutput
from treespec.model.pictures import PictureInputs
from treespec.model.placement import AS_IT_IS, Placement, find_device_of
from treespec.model.prefill import ChunkedPrefill
from treespec.model.quantization.gguf import share_gguf_reader
from treespec.model.quantization.layers import copy_output_embedding_rows, get_linear_sizes
from treespec.model.rotary import find_longest_short_text
from treespec.model.support import (
    LENGTH_DEPENDENT,
    end_tokens,
    find_context_length,
    find_decoder,
    refuse_what_cannot_branch,
    refusing,
)
from treespec.model.tokenizers import load_tokenizer
from treespec.model.tree_check import check_one_token_decoding, detect_windows
from treespec.model.tree_decoder import AuxLayers, TreeDecoder
from treespec.model.weights import load_model
from treespec.trees.mask import compute_positions
from treespec.trees.tree import TokenTree

log = logging.getLogger(__name__)


@final
class Target:
    """A decoder and its tokenizer. It holds no state of a text; the cache does.

    Attributes:
        vocab_size: V.
        feature_width: H, the width of the hidden states that enter the output embedding.
        context_length: number of positions that the model scores exactly.
        longest_short_text: number of tokens of the longest text with short rotary factors; None if all texts have
            the same factors.
        tree_decoder: its decoder; unset if the model has only its embeddings.
        tree_obstacle: why it decodes one token at a time only; "": it scores trees.

    Raises:
        InputError: the model cannot score a tree.
    """

    trust_remote_code = False  # whether `load` was allowed to run the model's Python files
    follows_pictures = False  # whether a trial has shown that trees can follow pictures
    tree_obstacle = ""
    has_streams = False  # whether layers pass on several hidden states of a token, by a trial

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        ends: bool = False,
        needs_trees: bool = True,
    ) -> None:
        """ends: whether the model has only its embeddings, as `treespec.model.weights.load_ends` loads it.

        needs_trees: whether to refuse a model whose trees fail their check. With False it is kept if it decodes one
        token at a time correctly, and `tree_obstacle` says why.
        """
        self.model = model = unwrap_adapter(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.ends = ends
        with refusing(model):
            refuse_what_cannot_branch(model)
            self._read_ends(model)
            if not ends:
                self._read_layers(model)
                self.output_device = self._check_forwards(needs_trees)
                self.tree_decoder.graphs = build_graphs(model, self.tree_decoder)

    def _read_ends(self, model: PreTrainedModel) -> None:
        """Read sizes and end tokens from the model and its config."""
        self.config = model.config.get_text_config()
        self.dtype = model.dtype
        self.eos = end_tokens(model)
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size, self.feature_width = get_linear_sizes(model.get_output_embeddings())
        limit = find_context_length(self.config)
        self.context_length = limit.length
        if limit.reason:
            self._end_texts(limit.length, limit.reason)
        self.longest_short_text = find_longest_short_text(self.config)
        self.device = self.output_device = find_device_of(model)
        self.output_path = OutputPath(model, find_decoder(model))

    def _read_layers(self, model: PreTrainedModel) -> None:
        """Find the layers, and prepare the model for trees."""
        self.tree_decoder = TreeDecoder(model, self.config, self.context_length, self.device)
        if self.longest_short_text and self.tree_decoder.factors is None:
            self._end_texts(self.longest_short_text, LENGTH_DEPENDENT)
        mask_room = max(1 << 20, model.get_memory_footprint() >> 8)  # entries
        self.chunked_prefill = ChunkedPrefill(self.tree_decoder, mask_room)

    def _check_forwards(self, needs_trees: bool) -> torch.device:
        """Check trees, or else one-token decoding if that is enough. Returns the device of the features."""
        try:
            return detect_windows(self)
        except Exception as error:  # a model's own code may raise anything
            if needs_trees:
                raise
            try:
                device = check_one_token_decoding(self)
            except Exception:
                raise error from None
            self.tree_obstacle = get_first_line(error)
            log.warning("one token at a time, since trees fail a check: %s", self.tree_obstacle)
            return device

    def _end_texts(self, length: int, why: str) -> None:
        """Limit texts to `length` tokens, and log why."""
        self.context_length = length
        log.warning("%s: texts end at %d tokens: %s", type(self.model).__name__, length, why)

    @classmethod
    def load(
        cls, path: str, how: Placement = AS_IT_IS, needs_trees: bool = True, **changed: Any
    ) -> "Target":
        """Load the model and tokenizer of a directory or hub id.

        Args:
            path: a directory or hub id.
            how: how the model is loaded.
            needs_trees: as for the constructor.
            changed: fields of `how` to replace, such as `dtype`.

        Raises:
            InputError: the model cannot be loaded or cannot score a tree.
        """
        path = os.path.expanduser(path)
        how = replace(how, **changed)
        with share_gguf_reader(how):
            model = load_model(path, how)
            tokenizer = load_tokenizer(path, how)
        target = cls(model, tokenizer, needs_trees=needs_trees)
        target.trust_remote_code = how.trust_remote_code
        return target

    def build_cache(self, capacity: int = 512) -> TreeCache:
        """Make an empty cache of one text. capacity: columns to allocate at first; it grows by doubling."""
        return self.tree_decoder.build_cache(capacity)

    @property
    def embed_scale(self) -> float:
        """The factor on the model's embeddings (Gemma, Granite)."""
        scale = getattr(self.model.get_input_embeddings(), "embed_scale", 1.0)
        return float(scale) * getattr(self.config, "embedding_multiplier", 1.0)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Return [..., H] the first layer's input for tokens [...], on the device of the features."""
        rows = self.model.get_input_embeddings()(tokens.to(self.device)).to(self.output_device)
        return rows * getattr(self.config, "embedding_multiplier", 1.0)

    def copy_output_rows(self, tokens: Tensor) -> nn.Linear:
        """Copy the output embedding's rows for the tokens [N] to a linear layer H -> N of floats.

        It is on the device of the features. Raises InputError as `copy_output_embedding_rows`.
        """
        output = self.model.get_output_embeddings()
        if isinstance(output, PackedLinear):
            return output.copy_rows(tokens)
        return copy_output_embedding_rows(self.model, tokens, self.output_device)

    def compute_output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """Return [..., V] logits of hidden states [..., H] after the final norm, as the model computes them.

        output: `copy_output_rows` of N tokens, for logits [..., N]. Default: all tokens.
        """
        return self.output_path(hidden, output)

    def check_aux_layers(self, aux_layers: AuxLayers) -> None:
        """Raise InputError if the inputs of these layers cannot be features."""
        if aux_layers and self.has_streams:
            raise InputError(
                f"{type(self.model).__name__} hands several streams of hidden states from layer to "
                "layer, and this head reads the inputs of layers: take a head that reads the last "
                "hidden state alone, such as one of kind eagle"
            )

    @torch.no_grad()
    def prefill(
        self,
        cache: TreeCache,
        tokens: Tensor,
        aux_layers: AuxLayers = (),
        counts: Sequence[int] | None = None,
        pictures: PictureInputs | None = None,
        ahead: int = 0,
    ) -> Tensor:
        """Append tokens to each sequence and commit them, in chunks.

        Args:
            cache: of the B sequences.
            tokens: [B, P] int64.
            aux_layers: layers whose inputs are the features. Default: hidden states after the final norm.
            counts: by sequence, tokens to commit; further columns are padding. Default: all P.
            pictures: of the only sequence, from its first token on.
            ahead: number of tokens that further calls will append, if it is known.

        Returns: features [B, P, H].
        """
        counts = counts or [tokens.shape[1]] * len(tokens)
        ends = zip(cache.lengths, counts, strict=True)
        final_lengths = [length + count + ahead for length, count in ends]
        device = self.output_device
        self.chunked_prefill.refresh_factors(cache, final_lengths, device)
        return self.chunked_prefill.append(cache, tokens, counts, device, aux_layers, pictures)

    def choose_chunk_beside(self, columns: int) -> int:
        """Return the number of new positions per forward, as `ChunkedPrefill.choose_chunk_beside`."""
        return self.chunked_prefill.choose_chunk_beside(columns)

    @torch.no_grad()
    def compute_features(
        self, tokens: Tensor, aux_layers: AuxLayers = (), last: bool = False
    ) -> Tensor:
        """Return [B, T, H] features of whole texts, without a cache, as training needs them.

        Args:
            tokens: [B, T] int64; any padding on the right.
            aux_layers: as for `prefill`.
            last: whether to append the hidden states after the final norm to the aux layers' inputs.
        """
        arguments = {"input_ids": tokens.to(self.device), "use_cache": False}
        hidden, features = self.tree_decoder.call_decoder(arguments, aux_layers)
        if aux_layers and last:
            features = torch.cat([features, hidden], dim=-1)
        limit = self.longest_short_text
        if not limit or tokens.shape[1] <= limit:
            return features
        # A token sees only earlier tokens, so the first `limit` tokens have the factors of a short text.
        short = self.compute_features(tokens[:, :limit], aux_layers, last)
        return torch.cat([short, features[:, limit:]], 1)

    def split_features(self, features: Tensor, aux_layers: AuxLayers) -> tuple[Tensor, Tensor]:
        """Split `compute_features(…, last=True)` [..., F] into the head's features and the last hidden states."""
        last = features[..., -self.feature_width :]
        if not aux_layers:
            return features, last
        return features[..., : -self.feature_width], last

    def forward_tree(
        self, cache: TreeCache, tree: TokenTree, aux_layers: AuxLayers = ()
    ) -> TreeOutput:
        """As `forward_trees`, of one text."""
        return self.forward_trees(cache, [tree], aux_layers)[0]

    @torch.no_grad()
    def forward_trees(
        self, cache: TreeCache, trees: Sequence[TokenTree], aux_layers: AuxLayers = ()
    ) -> list[TreeOutput]:
        """Forward a tree for each text of the cache: the only forward of a cycle.

        The trees' keys and values are written after the longest text, and `cache.commit` keeps accepted ones.
        Trees of five nodes and of three, after texts of three tokens and of one:

            0 ─┬─ 1 ─── 3      0 ─┬─ 1
               └─ 2 ─── 4         └─ 2

            columns    | a b c | 0 1 2 3 4 |      positions   0 1 2 3 4 4 5 5      node 4 sees a b c 0 2 4
                       | p . . | 0 1 2 . . |                  0 . . 1 2 2 . .      node 2 sees p 0 2

        Args:
            cache: of the B texts.
            trees: one for each text.
            aux_layers: as for `prefill`.

        Returns: by text, logits [N, V] and features; inexact for nodes deeper than `find_deepest`.
        """
        self.chunked_prefill.refresh_factors(cache, cache.lengths, self.output_device)
        nodes = pad_trees(trees)
        places = compute_positions(nodes.depth, cache.lengths)
        sizes = [len(tree.tokens) for tree in trees]
        with cache.padding_after(sizes):
            hidden, features = self.tree_decoder.forward(
                cache, {"tokens": nodes.tokens}, places, nodes.ancestors, aux_layers
            )
        logits = self.compute_output_logits(unpad_rows(hidden, sizes)).split(sizes)
        return [TreeOutput(logits[row], features[row, :size]) for row, size in enumerate(sizes)]

    def find_deepest(self, cache: TreeCache) -> list[int] | None:
        """Return, by text, the largest depth of a node with exact logits; None: any depth in all texts."""
        factors = self.tree_decoder.factors
        if factors is None:
            return None
        return factors.find_deepest(cache)

    @torch.no_grad()
    def forward_nodes(
        self, cache: TreeCache, tokens: Tensor, places: Tensor, seen: Tensor
    ) -> Tensor:
        """Return [B, N, H] hidden states after the final norm, of nodes below nodes of earlier calls.

        Args:
            cache: of the B texts.
            tokens: [B, N] int64.
            places: [B, T] int64, the positions of all T columns.
            seen: [B, N, U] bool, the uncommitted columns that each node sees: columns of earlier calls,
                then the N columns that this call writes.

        Two texts, each with a root r from an earlier call. The first has two nodes x and y below
        it, the second x and a padding node. U is 3:

            columns   | a b c | r | x y |   places 0 1 2 3 4 4   x sees a b c r x, y sees a b c r y
                      | p q . | r | x . |          0 1 . 2 3 3   x sees p q r x

        Nothing is committed: only columns after the cache's end change.
        """
        with cache.writing_after(seen.shape[2] - tokens.shape[1]):
            return self.tree_decoder.forward(cache, {"tokens": tokens}, places, seen, ())[0]
