"""Runs a decoder whose layers are all fused without the model's loop over them, if a trial gives the same bits.

A forward of a small model over one token takes ten milliseconds, and one of them is the model's own Python. It checks
arguments, builds masks that exist already, and calls each layer, although the first call has computed all of them
(`fused_layers`).

    the model's loop    embedding -> layer 0, layer 1, …, each by its module -> norm
    here                embedding -> layers 0, 1, …, by one call in C        -> norm
"""

import logging
from collections.abc import Sequence
from itertools import pairwise
from operator import is_
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.utils.hooks import RemovableHandle

from treespec.model.cache import TreeCache
from treespec.model.cpu.decoder_block import run_blocks
from treespec.model.cpu.fused_layers import Fusion
from treespec.model.masks import to_additive_mask

log = logging.getLogger(__name__)

PART_NAMES = {"embed_tokens", "layers", "norm", "rotary_emb"}
TRIAL_NODES = 5
TRIAL_PLACE = 100  # of the second text's first node


@final
class DirectDecoder:
    """Computes what a decoder computes, as long as nobody changes it.

    Attributes:
        decoder: of the model, whose modules for embedding, angles and norm are called as modules.
        fusion: of its layers.
        parts: its modules when this was built.
        layers: its layers then.
        hooks_before: the number of hooks that the process had registered when all parts were last found unchanged;
            None: they are looked at before the next forward.
    """

    def __init__(self, decoder: Any, fusion: Fusion) -> None:
        """decoder: with the modules `PART_NAMES`, and layers that are all fused. fusion: of its layers."""
        self.decoder = decoder
        self.fusion = fusion
        self.parts = list(decoder._modules.values())
        self.layers = list(decoder.layers)
        self.hooks_before: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the decoder has layers that are not fused."""
        return

    def run(
        self, cache: TreeCache, tokens: Tensor, places: Tensor, mask: Any, aux_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Returns hidden states after the final norm and features, as `forward_with_features`; None: it cannot.

        Args:
            cache: of B texts, which the layers write.
            tokens: [B, N] int64.
            places: [B, N] int64, the positions of the nodes.
            mask: [B, 1, N, T] additive. Masks by layer type are left to the decoder.
            aux_layers: layers whose inputs are the features. (): the hidden states are.
        """
        stores = cache.tree_layers
        if not stores[0].length:
            self.hooks_before = None
        if not isinstance(mask, Tensor) or not self.is_unchanged():
            return None
        x = self.decoder.embed_tokens(tokens)
        if not self.fusion.forwards[0].can_run(x):
            return None
        angles = self.decoder.rotary_emb(x, position_ids=places)

        # One call for the layers up to each layer whose input is a feature.
        count = len(self.layers)
        inputs = {}
        for first, end in pairwise(sorted({0, count, *aux_layers})):
            inputs[first] = x
            stack = self.fusion.get_stack(first, end)
            x = run_blocks(stack, x, x, mask, angles, stores[first:end], cache.node_counts)
        inputs[count] = x
        hidden = self.decoder.norm(x)
        if not aux_layers:
            return hidden, hidden
        return hidden, torch.cat([inputs[k] for k in aux_layers], dim=-1)

    def is_unchanged(self) -> bool:
        """Whether the decoder and its layers have their own modules, parameters and forwards, without hooks.

        A look at all of them takes a thirtieth of a forward, so it is done when a text begins, after `hooks_before` is
        set to None, and after anything in the process has registered a hook. In between, another module is seen, but
        another parameter or forward of one counts from the next text on.
        """
        if self.hooks_before != RemovableHandle.next_id:
            self.hooks_before = None
            if not self.has_own_code() or not self.fusion.parts.is_unchanged():
                return False
            self.hooks_before = RemovableHandle.next_id
        if not self.fusion.runs_ahead:
            return False
        return self.has_own_modules()

    def has_own_code(self) -> bool:
        """Whether the decoder runs its class's forward, without hooks, over all of its layers."""
        decoder = self.decoder
        if decoder._forward_hooks or decoder._forward_pre_hooks or "forward" in vars(decoder):
            return False
        # torch tells in no other way whether there are hooks of all modules: the layers' modules would not run them.
        if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
            return False
        return bool(decoder.config.num_hidden_layers == len(self.layers))

    def has_own_modules(self) -> bool:
        """Whether the decoder and its layers hold the modules that they had when this was built."""
        if not is_same(self.decoder._modules, self.parts):
            return False
        if not is_same(self.decoder.layers._modules, self.layers):
            return False
        return self.fusion.parts.has_same_modules()


def is_same(modules: dict[str, Any], known: Sequence[Any]) -> bool:
    """Whether these are the known modules, in their order: the very same objects."""
    if len(modules) != len(known):
        return False
    return all(map(is_, modules.values(), known))


@torch.no_grad()
def build_direct_decoder(decoder: nn.Module, fusion: Fusion) -> DirectDecoder | None:
    """Returns what runs a decoder without its loop; None if a part of it is not known, or a trial gives other bits."""
    if set(decoder._modules) != PART_NAMES:
        return None
    layers = decoder._modules["layers"]
    if not isinstance(layers, nn.ModuleList) or sorted(fusion.forwards) != list(range(len(layers))):
        return None
    if any(fusion.forwards[k].layer is not layer for k, layer in enumerate(layers)):
        return None
    direct = DirectDecoder(decoder, fusion)
    if not is_exact(direct):
        log.info("%s computes more than its layers: its own loop runs", type(decoder).__name__)
        return None
    return direct


def is_exact(direct: DirectDecoder) -> bool:
    """Whether a trial of two texts of five nodes gives the decoder's hidden states, keys and values, to the bit."""
    # 1. Random tokens and a tree.
    decoder = direct.decoder
    random = torch.Generator().manual_seed(0)
    rows = decoder.embed_tokens.num_embeddings
    tokens = torch.randint(rows, (2, TRIAL_NODES), generator=random, device="cpu")
    starts = torch.tensor([[0], [TRIAL_PLACE]], dtype=torch.int64, device="cpu")
    places = starts + torch.arange(TRIAL_NODES, device="cpu")
    shape = (2, 1, TRIAL_NODES, TRIAL_NODES)
    visible = torch.randint(2, shape, generator=random, dtype=torch.bool, device="cpu")
    visible |= torch.eye(TRIAL_NODES, dtype=torch.bool, device="cpu")
    mask = to_additive_mask(visible, direct.fusion.forwards[0].weights.dtype)

    # 2. Both ways.
    cache = TreeCache(len(direct.layers), TRIAL_NODES)
    cache.rewind([0, 0])
    found = direct.run(cache, tokens, places, mask, ())
    if found is None:
        return False
    plain_cache = TreeCache(len(direct.layers), TRIAL_NODES)
    plain_cache.rewind([0, 0])
    expected = decoder(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=places,
        past_key_values=plain_cache,
        use_cache=True,
    ).last_hidden_state
    if not torch.equal(found[0], expected):
        return False
    return all(
        torch.equal(part, expected_part)
        for layer, plain_layer in zip(cache.tree_layers, plain_cache.tree_layers, strict=True)
        for part, expected_part in zip(layer.storage, plain_layer.storage, strict=True)
    )
