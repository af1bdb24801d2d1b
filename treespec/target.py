"""Any transformers decoder as the target: one forward scores a whole tree.

No model code is copied. Trees pass through what every decoder already accepts: an explicit 4D attention
mask (a dict of them where layer types alternate), explicit `position_ids`, and a `Cache` of ours. What
cannot hold a tree is refused by name, and the first forward after loading is checked against the plain model.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from treespec.cache import TreeCache
from treespec.model.attention import repeats, stack_query_heads
from treespec.model.chunks import causal_chunks
from treespec.model.inspect import (
    context_length,
    decoder_of,
    end_tokens,
    layer_windows,
    layers_of,
    refuse_what_cannot_branch,
    refusing,
)
from treespec.model.masks import additive_masks, together, unpadded
from treespec.model.output import rows_of_output, scaled
from treespec.model.plain import understand
from treespec.model.taps import captured, tapped
from treespec.model.weights import load_model
from treespec.text.tokenizers import load_tokenizer
from treespec.trees.mask import attention_mask, positions
from treespec.trees.tree import TokenTree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TreeOutput:
    """logits: [N, V]. features: [N, H], or [N, taps * H] where a head taps several layers.

    rows: [asked, V] logits of the tree's extra rows, where it has any.
    """

    logits: Tensor
    features: Tensor
    rows: Tensor | None = None


@final
class Target:
    """A decoder and its tokenizer. It holds no text: caches, masks and positions are arguments.

    vocab_size: V. feature_width: H of the hidden states that enter the output embedding.
    The model's sdpa attention is set to `tree_attention`. Raises InputError if the model cannot hold a tree.
    """

    trust_remote_code = False  # whether `load` was allowed to run the model's Python files

    def __init__(self, model: PreTrainedModel, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        with refusing(model):
            self._read(model)
            self.output_device = understand(self)

    def _read(self, model: PreTrainedModel) -> None:
        """Read layers, sizes, windows and end tokens from the model and its config."""
        refuse_what_cannot_branch(model)
        stack_query_heads(model)
        self.decoder = decoder_of(model)
        self.config = model.config.get_text_config()
        self.dtype = model.dtype
        self.eos = end_tokens(model)
        self.layers: int = self.config.num_hidden_layers
        self.vocab_size, self.feature_width = model.get_output_embeddings().weight.shape
        self.context_length, why = context_length(self.config)
        if why:
            log.warning(
                "%s: texts end at %d tokens: %s", type(model).__name__, self.context_length, why
            )
        hook = getattr(model, "_hf_hook", None)
        self.device = torch.device(getattr(hook, "execution_device", None) or model.device)
        self.windows = layer_windows(self.config)
        self.stack = layers_of(self.decoder, self.layers)
        self.mask_room = max(1 << 20, model.get_memory_footprint() >> 8)  # entries
        self.repeats_masks = (
            True  # once for all layers; no model that computes with masks takes them so
        )

    @classmethod
    def load(
        cls,
        path: str,
        *,
        device_map: Any = None,
        dtype: str | torch.dtype = "auto",
        max_memory: dict | None = None,
        offload_folder: str | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> "Target":
        """A directory or a hub id, placed by accelerate. Raises InputError for what cannot be loaded.

        trust_remote_code: run the Python files that the directory or repository brings.
        """
        path = os.path.expanduser(path)
        options = {
            "device_map": device_map,
            "max_memory": max_memory,
            "offload_folder": offload_folder,
        }
        options = {name: value for name, value in options.items() if value is not None}
        model = load_model(
            path, trust_remote_code, dtype=dtype, attn_implementation=attn_implementation, **options
        )
        target = cls(model, load_tokenizer(path, trust_remote_code))
        target.trust_remote_code = trust_remote_code
        return target

    def new_cache(self, capacity: int = 512) -> TreeCache:
        return TreeCache(self.layers, capacity)

    @property
    def embed_scale(self) -> float:
        """The factor on the model's embeddings (Gemma, Granite)."""
        own = getattr(self.model.get_input_embeddings(), "embed_scale", 1.0)
        return float(own) * getattr(self.config, "embedding_multiplier", 1.0)

    def embeddings(self, tokens: Tensor) -> Tensor:
        """[...] tokens -> [..., H] the first layer's input, on the device of the features."""
        rows = self.model.get_input_embeddings()(tokens.to(self.device)).to(self.output_device)
        return rows * getattr(self.config, "embedding_multiplier", 1.0)

    def output_rows(self, tokens: Tensor) -> nn.Linear:
        """A copy of the output embedding for the tokens [N] alone, H -> N, on the device of the features.

        Raises InputError for an output embedding that is offloaded, or no plain linear layer (any more).
        """
        return rows_of_output(self.model, tokens, self.output_device)

    def output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """[..., H] hidden states after the final norm -> [..., V] logits, by the model's own output path.

        output: `output_rows`, for the logits of those tokens alone.
        """
        logits = (output or self.model.get_output_embeddings())(hidden)
        logits = logits.to(hidden.device)  # a tied output may lie elsewhere
        return scaled(logits, self.config)

    @torch.no_grad()
    def prefill(
        self,
        cache: TreeCache,
        tokens: Tensor,
        taps: tuple[int, ...] = (),
        chunk: int | None = None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Commit a stretch of each text, in chunks. tokens: [B, P] int64. Returns features [B, P, H].

        chunk: tokens per forward. Default: a power of two (16 to 512) whose mask stays small compared with the
        weights; few shapes, because oneDNN caches memory for each.
        counts: tokens to commit of each text, default all; the rest of its row is padding, also in the features.
        """
        b, length = tokens.shape
        cache.reserve(cache.end + length)
        whole: Tensor | None = None
        for one in causal_chunks(
            cache, counts or [length] * b, lambda columns: chunk or self.rows_beside(columns)
        ):
            features = self._hidden(cache, tokens[:, one.columns], one.depth, one.causal, taps)[1]
            if whole is None:
                whole = features.new_empty(b, length, features.shape[-1])
            whole[:, one.columns] = features
        assert whole is not None
        return whole

    def rows_beside(self, columns: int) -> int:
        """New positions per forward, 16 to 512 by powers of two, whose mask over a cache of `columns` stays small."""
        room = max(16, min(512, self.mask_room // (columns + 512)))
        return 1 << (room.bit_length() - 1)

    @torch.no_grad()
    def features(self, tokens: Tensor, taps: tuple[int, ...] = (), last: bool = False) -> Tensor:
        """[B, T] tokens, padded on the right with anything -> [B, T, H] features, without a cache; for training.

        last: append the last hidden state to the tapped ones.
        """
        with captured(self.stack, taps) as inputs:
            hidden = self.decoder(
                input_ids=tokens.to(self.device), use_cache=False
            ).last_hidden_state
        if not taps:
            return hidden
        tapped = [inputs[k].to(hidden.device) for k in taps]
        return torch.cat([*tapped, hidden] if last else tapped, dim=-1)

    def parted(self, features: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Split `features(…, last=True)`, [..., F], into the head's features and the last hidden state."""
        return (features[..., : -self.feature_width] if taps else features), features[
            ..., -self.feature_width :
        ]

    @torch.no_grad()
    def forward_tree(
        self, cache: TreeCache, tree: TokenTree, taps: tuple[int, ...] = ()
    ) -> TreeOutput:
        """`forward_trees` of one text."""
        return self.forward_trees(cache, [tree], taps)[0]

    @torch.no_grad()
    def forward_trees(
        self, cache: TreeCache, trees: Sequence[TokenTree], taps: tuple[int, ...] = ()
    ) -> list[TreeOutput]:
        """The one forward of a cycle: a tree for each text of the cache, written behind it for `cache.commit` to keep.

        A tree's extra rows are written behind its nodes. Smaller trees are padded with nodes of token 0 that no other
        node sees.
        """
        given, depths, seen = zip(*(tree.forwarded() for tree in trees), strict=True)
        tokens, depth = together(given).clamp_min(0), together(depths)  # [B, N + M]
        if len(trees) == 1:
            ancestors = seen[0][None]
        else:
            ancestors = torch.eye(tokens.shape[1], dtype=torch.bool, device=depth.device).repeat(
                len(trees), 1, 1
            )
            for row, mask in enumerate(seen):
                ancestors[row, : len(mask), : len(mask)] = mask
        hidden, features = self._hidden(cache, tokens, depth, ancestors, taps)
        nodes = [len(tree.tokens) for tree in trees]
        sizes = [
            n + (tree.rows.asked if tree.rows else 0) for n, tree in zip(nodes, trees, strict=True)
        ]
        logits = self.output_logits(unpadded(hidden, sizes)).split(sizes)
        return [
            TreeOutput(row[:n], known[:n], row[n:] if tree.rows else None)
            for row, known, n, tree in zip(logits, features, nodes, trees, strict=True)
        ]

    def _hidden(
        self,
        cache: TreeCache,
        tokens: Tensor,
        depth: Tensor,
        ancestors: Tensor,
        taps: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """One forward of the decoder over [B, N] nodes: hidden states after the final norm, and features."""
        places = positions(depth, cache.lengths)
        seen = attention_mask(ancestors, depth, cache.lengths)
        return self._forward(cache, tokens, places, seen, taps)

    @torch.no_grad()
    def forward_nodes(
        self, cache: TreeCache, tokens: Tensor, places: Tensor, seen: Tensor
    ) -> Tensor:
        """[B, N, H] hidden states, after the final norm, of nodes below those that earlier calls have written.

        tokens: [B, N] int64. seen: [B, N, T] bool, which columns each node attends to: T - N earlier ones and the N
        that this call writes. places: [B, T] positions of the tokens of all T columns. Two texts with a root; the
        first has two children, the second has one and a padding node:

            columns   | a b c | r | x y |   places 0 1 2 3 4 4   x sees a b c r x, y sees a b c r y
                      | p q . | r | x . |          0 1 . 2 3 3   x sees p q r x

        Nothing is committed: only columns behind the cache's end change.
        """
        with cache.writing_at(seen.shape[2] - tokens.shape[1]):
            return self._forward(cache, tokens, places, seen, ())[0]

    def _forward(
        self, cache: TreeCache, tokens: Tensor, places: Tensor, seen: Tensor, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        return tapped(self.decoder, self.stack, cache, *self._given(tokens, places, seen), taps)

    def _given(self, tokens: Tensor, places: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Tokens, positions [B, N] and masks, as the decoder takes them."""
        # Learned positions end at the context length; a node beyond it is never kept.
        own = places[:, -tokens.shape[1] :].clamp_max(self.context_length - 1)
        repeated = repeats(self.config, tokens.shape[1]) if self.repeats_masks else 1
        masks = additive_masks(self.windows, places, seen, self.dtype, self.device, repeated)
        return tokens.to(self.device), own.to(self.device), masks
