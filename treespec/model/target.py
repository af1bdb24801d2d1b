"""Any transformers decoder as the target: one forward scores a whole tree.

No model code is copied. Every decoder accepts an explicit 4D attention mask (a dict of masks where
layer types alternate), `position_ids`, and a `Cache`; these carry the tree. A model that cannot
score a tree is refused. After loading, a small tree's logits are checked against the plain model's.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespec.errors import InputError
from treespec.model.adapters import unwrap_adapter
from treespec.model.attention import ATTENTION_NAME, take_trees
from treespec.model.cache import WINDOW_SLACK_TOKENS, TreeCache
from treespec.model.cuda_graphs import Graphs, GraphVariant, build_graphs
from treespec.model.masks import (
    as_taken,
    build_additive_masks,
    pad_trees,
    split_causal_chunks,
    unpad_rows,
)
from treespec.model.output import OutputPath, forward_with_features
from treespec.model.output import TreeOutput as TreeOutput
from treespec.model.pictures import PictureInputs
from treespec.model.placement import AS_IT_IS, Placement, find_device_of
from treespec.model.quantization.layers import copy_output_embedding_rows, get_linear_sizes
from treespec.model.quantization.load_in import unpack_compressed
from treespec.model.rotary import LengthFactors, find_longest_short_text
from treespec.model.support import (
    LENGTH_DEPENDENT,
    detect_layer_windows,
    end_tokens,
    find_context_length,
    find_decoder,
    find_layers,
    find_recurrent_layers,
    list_forward_arguments,
    refuse_what_cannot_branch,
    refusing,
)
from treespec.model.tokenizers import load_tokenizer
from treespec.model.tree_check import detect_windows
from treespec.model.weights import load_model
from treespec.trees.mask import compute_positions
from treespec.trees.tree import TokenTree, to_device

log = logging.getLogger(__name__)

AuxLayers = tuple[int, ...]


@final
class Target:
    """A decoder and its tokenizer. It holds no state of a text; the cache does.

    sdpa attention becomes `treespec.model.attention.attend_tree`.

    Attributes:
        vocab_size: V.
        feature_width: H, the width of the hidden states that enter the output embedding.
        context_length: number of positions that the model scores exactly.
        longest_short_text: number of tokens of the longest text with short rotary factors; None if all texts have
            the same factors.

    Raises:
        InputError: the model cannot score a tree.
    """

    trust_remote_code = False  # whether `load` was allowed to run the model's Python files
    slack = WINDOW_SLACK_TOKENS  # tokens that its caches can take back in layers with a window
    follows_pictures = False  # whether a trial has shown that trees can follow pictures
    has_streams = False  # whether layers pass on several hidden states of a token, by a trial
    graphs: Graphs | None = None  # of its forwards, on CUDA
    factors: LengthFactors | None = None  # of its rotary modules, if they differ by length

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None, ends: bool = False) -> None:
        """ends: whether the model has only its embeddings, as `treespec.model.weights.load_ends` loads it."""
        self.model = model = unwrap_adapter(model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.ends = ends
        with refusing(model):
            refuse_what_cannot_branch(model)
            self._read_ends(model)
            if not ends:
                self._read_layers(model)
                self.output_device = detect_windows(self)
                self.graphs = build_graphs(self)

    def _read_ends(self, model: PreTrainedModel) -> None:
        """Read sizes and end tokens from the model and its config."""
        self.config = model.config.get_text_config()
        self.dtype, self.eos, self.stack = model.dtype, end_tokens(model), nn.ModuleList()
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size, self.feature_width = get_linear_sizes(model.get_output_embeddings())
        self.layer_types, self.windows = detect_layer_windows(self.config)
        limit = find_context_length(self.config)
        self.context_length = limit.length
        if limit.reason:
            self._end_texts(limit.length, limit.reason)
        self.longest_short_text = find_longest_short_text(self.config)
        self.device = self.output_device = find_device_of(model)
        self.output_path = OutputPath(model, find_decoder(model))

    def _read_layers(self, model: PreTrainedModel) -> None:
        """Find the layers, and prepare the model for trees."""
        take_trees(model)
        unpack_compressed(model)
        self.decoder = find_decoder(model)
        self.forward_arguments = list_forward_arguments(self.decoder)
        self.stack = find_layers(self.decoder, self.layers, self.device)
        self.recurrent = find_recurrent_layers(model, self.decoder, self.layers)
        if self.recurrent and not self.recurrent.has_attention:
            self.windows = {}
        if self.longest_short_text:
            factors = LengthFactors(self.decoder, self.longest_short_text)
            if factors.is_understood(self.dtype, self.device):
                self.factors = factors
            else:
                self._end_texts(self.longest_short_text, LENGTH_DEPENDENT)
        self.mask_room = max(1 << 20, model.get_memory_footprint() >> 8)  # entries in a prefill

    def _end_texts(self, length: int, why: str) -> None:
        """Limit texts to `length` tokens, and log why."""
        self.context_length = length
        log.warning("%s: texts end at %d tokens: %s", type(self.model).__name__, length, why)

    @classmethod
    def load(cls, path: str, how: Placement = AS_IT_IS, **changed: Any) -> "Target":
        """Load the model and tokenizer of a directory or hub id.

        Args:
            path: a directory or hub id.
            how: how the model is loaded.
            changed: fields of `how` to replace, such as `dtype`.

        Raises:
            InputError: the model cannot be loaded or cannot score a tree.
        """
        path = os.path.expanduser(path)
        how = replace(how, **changed)
        target = cls(load_model(path, how), load_tokenizer(path, how))
        target.trust_remote_code = how.trust_remote_code
        return target

    def build_cache(self, capacity: int = 512) -> TreeCache:
        """Make an empty cache of one text. capacity: columns to allocate at first; it grows by doubling."""
        windows = [self.windows.get(kind) for kind in self.layer_types]
        return TreeCache(self.layers, capacity, self.recurrent, windows, self.slack)

    @property
    def masks_last(self) -> bool:
        """Whether the attention takes masks of only the last columns: our kernels do."""
        if self.config._attn_implementation != ATTENTION_NAME or self.graphs:
            return False
        return self.device.type == "cpu"

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
        self._rotate(cache, [length + count + ahead for length, count in ends])
        return self._append(cache, tokens, counts, aux_layers, pictures)

    def _append(
        self,
        cache: TreeCache,
        tokens: Tensor,
        counts: Sequence[int],
        aux_layers: AuxLayers = (),
        pictures: PictureInputs | None = None,
    ) -> Tensor:
        """As `prefill`, with the rotary factors that the sequences have now."""
        cache.reserve(cache.end + tokens.shape[1])
        features: list[Tensor] = []
        for part in split_causal_chunks(
            cache, counts, self.choose_prefill_chunk, self.output_device
        ):
            model_inputs: dict[str, Any] = {"tokens": tokens[:, part.columns]}
            if pictures:
                model_inputs = pictures.select_arguments(
                    cache.end, cache.end + part.causal.shape[1]
                )
                cache.shift(pictures.shift)
            features.append(
                self._forward(cache, model_inputs, part.places, part.causal, aux_layers)[1]
            )
        cache.mark()
        return torch.cat(features, 1)

    def _rotate(self, cache: TreeCache, lengths: Sequence[int]) -> None:
        """Compute the keys of a text again if its rotary factors do not fit its new length.

        lengths: by sequence.

        Raises:
            InputError: a text with pictures becomes long.
        """
        if self.factors is None:
            return
        for row in self.factors.find_outdated(cache, lengths):
            snapshot = cache.rows[row].now
            new_cache = self.build_cache(max(snapshot.length, 1))
            new_cache.replace_with(not snapshot.is_long)
            if snapshot.length:
                if snapshot.tokens is None:
                    raise InputError(
                        f"a text with pictures ends at {self.longest_short_text} tokens in this model"
                    )
                self._append(new_cache, snapshot.tokens[None], [snapshot.length])
            cache.put(row, new_cache)

    def choose_prefill_chunk(self, columns: int) -> int:
        """Return the number of new positions per forward of a prompt: `choose_chunk_beside` of the masked columns."""
        if self.masks_last:
            return self.choose_chunk_beside(min(columns, 1))
        return self.choose_chunk_beside(columns)

    def choose_chunk_beside(self, columns: int) -> int:
        """Return the number of new positions per forward: a power of two (16 to 512) whose mask is small.

        Powers of two, because oneDNN caches memory for each shape.

        columns: that the mask covers besides the new ones.
        """
        if self.recurrent and not self.recurrent.continues and not columns:
            return 1024  # the layers take all later positions token by token
        room = max(16, min(512, self.mask_room // (columns + 512)))
        return 1 << (room.bit_length() - 1)

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
        hidden, features = forward_with_features(self.decoder, self.stack, arguments, aux_layers)
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
        self._rotate(cache, cache.lengths)
        nodes = pad_trees(trees)
        places = compute_positions(nodes.depth, cache.lengths)
        model_inputs = {"tokens": nodes.tokens}
        hidden, features = self._forward(cache, model_inputs, places, nodes.ancestors, aux_layers)
        sizes = [len(tree.tokens) for tree in trees]
        logits = self.compute_output_logits(unpad_rows(hidden, sizes)).split(sizes)
        return [TreeOutput(logits[row], features[row, :size]) for row, size in enumerate(sizes)]

    def find_deepest(self, cache: TreeCache) -> list[int] | None:
        """Return, by text, the largest depth of a node with exact logits; None: any depth in all texts."""
        if self.factors is None:
            return None
        return self.factors.find_deepest(cache)

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
            return self._forward(cache, {"tokens": tokens}, places, seen, ())[0]

    def _forward(
        self,
        cache: TreeCache,
        model_inputs: dict[str, Any],
        places: Tensor,
        seen: Tensor,
        aux_layers: AuxLayers,
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states after the final norm, and features, of B trees of N nodes.

        Args:
            cache: of the B texts.
            model_inputs: `tokens` [B, N] int64, or the arguments of `PictureInputs`.
            places: [B, T] int64, the positions of all T columns.
            seen: [B, N, U] bool, the uncommitted columns that each node sees.
            aux_layers: as for `prefill`.
        """
        # 1. Masks and positions. Learned positions end at the context length, so positions are clamped:
        #    no node beyond is kept.
        n = seen.shape[1]
        node_places = cache.shift_positions(places[:, -n:].clamp_max(self.context_length - 1))
        free = min(cache.lengths) if self.masks_last else 0
        columns = partial(cache.mask_positions, places, free)
        masks = build_additive_masks(self.windows, columns, seen, self.dtype, self.device)
        inputs = {"places": to_device(node_places, self.device)}
        if "tokens" in model_inputs:
            inputs["tokens"] = to_device(model_inputs["tokens"], self.device)
        if self.factors:
            inputs["is_long"] = self.factors.select_rows(cache, n, self.device)
            cache.tokens = inputs.get("tokens")

        # 2. The forward, by a graph if possible. Models with recurrent layers have no graphs.
        run = partial(self._run_decoder, cache, model_inputs, tuple(masks), aux_layers)
        if self.graphs and "tokens" in inputs:
            graph_masks = {kind: (self.windows[kind], mask) for kind, mask in masks.items()}
            variant = GraphVariant(n, n, ("texts", "rows"), aux_layers)
            hidden, features = self.graphs(cache.tree_layers, run, inputs, graph_masks, variant)
            return hidden, features.clone()
        if self.recurrent is None:
            return run(inputs | masks)
        with self.recurrent.running(cache, places, seen):
            return run(inputs | masks)

    def _run_decoder(
        self,
        cache: TreeCache,
        model_inputs: dict[str, Any],
        layer_types: Sequence[str],
        aux_layers: AuxLayers,
        inputs: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """As `_forward`, after masks and positions are made.

        Args:
            cache: of the B texts.
            model_inputs: arguments of the decoder, if `inputs` holds no tokens.
            layer_types: names of the masks in `inputs`.
            aux_layers: as for `prefill`.
            inputs: [B, N] by name, and masks [B, 1, N, T] by layer type.
        """
        masks: Any = as_taken({kind: inputs[kind] for kind in layer_types})
        if self.recurrent:
            masks = self.recurrent.build_all_masks(masks)
        offered: dict[str, Any] = {"past_key_values": cache, "cache_params": cache}
        offered |= {"attention_mask": masks, "position_ids": inputs["places"]}
        arguments = {
            name: value for name, value in offered.items() if name in self.forward_arguments
        }
        if "tokens" in inputs:
            arguments["input_ids"] = inputs["tokens"]
        else:
            arguments |= model_inputs
        arguments["use_cache"] = True
        if self.factors is None:
            return forward_with_features(self.decoder, self.stack, arguments, aux_layers)
        with self.factors.by_text(inputs["is_long"]):
            return forward_with_features(self.decoder, self.stack, arguments, aux_layers)
