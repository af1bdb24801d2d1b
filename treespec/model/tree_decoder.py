"""The decoder of a model, prepared for trees: its caches, the masks of its layers, and its forward.

Every decoder accepts an explicit 4D attention mask (a dict of masks where layer types alternate),
`position_ids`, and a `Cache`; these carry the tree.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from treespec.model.attention import ATTENTION_NAME, take_trees
from treespec.model.cache import WINDOW_SLACK_TOKENS, TreeCache
from treespec.model.cpu.direct_decoder import DirectDecoder
from treespec.model.cpu.fused_layers import FusedForward, LayerInputError
from treespec.model.cuda_graphs import Graphs
from treespec.model.graph_keys import GraphVariant
from treespec.model.masks import as_taken, build_additive_masks
from treespec.model.output import forward_with_features
from treespec.model.quantization.load_in import unpack_compressed
from treespec.model.rotary import LengthFactors, find_longest_short_text
from treespec.model.support import (
    detect_layer_windows,
    find_decoder,
    find_layers,
    find_recurrent_layers,
    list_forward_arguments,
)
from treespec.trees.tree import to_device

AuxLayers = tuple[int, ...]


@final
class TreeDecoder:
    """The decoder of a model. It holds no state of a text; the cache does.

    sdpa attention becomes `treespec.model.attention.attend_tree`.

    Attributes:
        decoder: the part of the model whose output is the hidden states after the final norm.
        stack: its layers.
        recurrent: its recurrent layers; None: it has none.
        windows: {layer type: its window or chunk}; a trial changes it (`treespec.model.tree_check`).
        slack: tokens that caches can take back in layers with a window.
        context_length: number of positions that the decoder computes exactly.
        direct: runs the decoder without its loop over the layers; None: the loop runs.
        factors: of its rotary modules, if they differ by the length of a text and are understood.
        graphs: of its forwards, on CUDA; None: it runs without.
    """

    slack = WINDOW_SLACK_TOKENS
    graphs: Graphs | None = None
    direct: DirectDecoder | None = None
    factors: LengthFactors | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        config: PreTrainedConfig,
        context_length: int,
        device: torch.device,
    ) -> None:
        """Find the layers of a model, and prepare it for trees.

        Args:
            model: the causal language model.
            config: of its text layers.
            context_length: number of positions that the config allows.
            device: of the first layer's input.
        """
        self.config = config
        self.dtype = model.dtype
        self.device = device
        self.context_length = context_length

        # 1. The layers.
        self.layer_types, self.windows = detect_layer_windows(config)
        self.layers: int = config.num_hidden_layers
        take_trees(model)
        unpack_compressed(model)
        self.decoder = find_decoder(model)
        self.forward_arguments = list_forward_arguments(self.decoder)
        self.stack = find_layers(self.decoder, self.layers, device)
        self.recurrent = find_recurrent_layers(model, self.decoder, self.layers)
        if self.recurrent and not self.recurrent.has_attention:
            self.windows = {}

        # 2. Rotary factors by length. Texts end before the factors change if the modules are not understood.
        longest_short_text = find_longest_short_text(config)
        if longest_short_text:
            factors = LengthFactors(self.decoder, longest_short_text)
            if factors.is_understood(self.dtype, device):
                self.factors = factors
            else:
                self.context_length = longest_short_text

    def build_cache(self, capacity: int) -> TreeCache:
        """Make an empty cache of one text. capacity: columns to allocate at first; it grows by doubling."""
        if self.direct is not None:
            self.direct.hooks_before = None  # a text begins: somebody may have changed the parts
        windows = [self.windows.get(kind) for kind in self.layer_types]
        return TreeCache(self.layers, capacity, self.recurrent, windows, self.slack)

    @property
    def masks_last(self) -> bool:
        """Whether the attention takes masks of only the last columns: our kernels do."""
        if self.config._attn_implementation != ATTENTION_NAME or self.graphs:
            return False
        return self.device.type == "cpu"

    def forward(
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
            aux_layers: layers whose inputs are the features. (): the hidden states are.
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
        run = partial(self._run, cache, model_inputs, tuple(masks), aux_layers)
        if self.graphs and "tokens" in inputs:
            graph_masks = {kind: (self.windows[kind], mask) for kind, mask in masks.items()}
            variant = GraphVariant(n, n, ("texts", "rows"), aux_layers)
            hidden, features = self.graphs(cache.tree_layers, run, inputs, graph_masks, variant)
            return hidden, features.clone()
        if self.recurrent is None:
            return run(inputs | masks)
        with self.recurrent.running(cache, places, seen):
            return run(inputs | masks)

    def _run(
        self,
        cache: TreeCache,
        model_inputs: dict[str, Any],
        layer_types: Sequence[str],
        aux_layers: AuxLayers,
        inputs: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, after masks and positions are made.

        Args:
            cache: of the B texts.
            model_inputs: arguments of the decoder, if `inputs` holds no tokens.
            layer_types: names of the masks in `inputs`.
            aux_layers: as for `forward`.
            inputs: [B, N] by name, and masks [B, 1, N, T] by layer type.
        """
        # 1. Without the decoder's loop over its layers, if nothing of it is missed.
        masks: Any = as_taken({kind: inputs[kind] for kind in layer_types})
        if self.direct is not None and self.factors is None and "tokens" in inputs:
            found = self.direct.run(cache, inputs["tokens"], inputs["places"], masks, aux_layers)
            if found is not None:
                return found

        # 2. With it.
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
        cache.layers_ahead = None  # an interrupted forward may have left it
        if self.factors is None:
            return self.call_decoder(arguments, aux_layers)
        with self.factors.by_text(inputs["is_long"]):
            return self.call_decoder(arguments, aux_layers)

    def call_decoder(
        self, arguments: dict[str, Any], aux_layers: AuxLayers
    ) -> tuple[Tensor, Tensor]:
        """Return hidden states after the final norm, and features, as `forward_with_features`.

        arguments: of the decoder's forward, by name. aux_layers: as for `forward`.
        """
        cache: Any = arguments.get("past_key_values")
        try:
            outputs = forward_with_features(self.decoder, self.stack, arguments, aux_layers)
            if getattr(cache, "layers_ahead", None) is None:
                return outputs
            self.stop_running_ahead()  # the last layers are computed, and the decoder does not call them
        except LayerInputError:
            self.stop_running_ahead()
        cache.layers_ahead = None
        return forward_with_features(self.decoder, self.stack, arguments, aux_layers)

    def stop_running_ahead(self) -> None:
        """From now on a fused layer's call computes no other layer."""
        for layer in self.stack:
            forward = vars(layer).get("forward")
            if isinstance(forward, FusedForward):
                forward.fusion.runs_ahead = False
