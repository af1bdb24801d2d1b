"""Append tokens to the sequences of a cache, in chunks whose masks stay small."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.masks import split_causal_chunks
from treespec.model.pictures import PictureInputs
from treespec.model.tree_decoder import AuxLayers, TreeDecoder


@final
class ChunkedPrefill:
    """Forwards the tokens of prompts through a decoder.

    Attributes:
        tree_decoder: the decoder.
        mask_room: number of entries that the mask of a forward may have.
    """

    def __init__(self, tree_decoder: TreeDecoder, mask_room: int) -> None:
        self.tree_decoder = tree_decoder
        self.mask_room = mask_room

    def append(
        self,
        cache: TreeCache,
        tokens: Tensor,
        counts: Sequence[int],
        device: torch.device,
        aux_layers: AuxLayers = (),
        pictures: PictureInputs | None = None,
    ) -> Tensor:
        """Append tokens to each sequence and commit them, with the rotary factors that the sequences have now.

        Args:
            cache: of the B sequences.
            tokens: [B, P] int64.
            counts: by sequence, tokens to commit; further columns are padding.
            device: of the features.
            aux_layers: layers whose inputs are the features. (): hidden states after the final norm.
            pictures: of the only sequence, from its first token on.

        Returns: features [B, P, H].
        """
        cache.reserve(cache.end + tokens.shape[1])
        features: list[Tensor] = []
        for chunk in split_causal_chunks(cache, counts, self.choose_prefill_chunk, device):
            model_inputs: dict[str, Any] = {"tokens": tokens[:, chunk.columns]}
            if pictures:
                chunk_end = cache.end + chunk.causal.shape[1]
                model_inputs = pictures.select_arguments(cache.end, chunk_end)
                cache.shift(pictures.shift)
            features.append(
                self.tree_decoder.forward(
                    cache, model_inputs, chunk.places, chunk.causal, aux_layers
                )[1]
            )
        cache.mark()
        return torch.cat(features, 1)

    def refresh_factors(
        self, cache: TreeCache, lengths: Sequence[int], device: torch.device
    ) -> None:
        """Compute the keys of a text again if its rotary factors do not fit its new length.

        lengths: by sequence. device: of the features.

        Raises:
            InputError: a text with pictures becomes long.
        """
        factors = self.tree_decoder.factors
        if factors is None:
            return
        for row in factors.find_outdated(cache, lengths):
            snapshot = cache.rows[row].now
            new_cache = self.tree_decoder.build_cache(max(snapshot.length, 1))
            new_cache.replace_with(not snapshot.is_long)
            if snapshot.length:
                if snapshot.tokens is None:
                    raise InputError(
                        f"a text with pictures ends at {factors.limit} tokens in this model"
                    )
                self.append(new_cache, snapshot.tokens[None], [snapshot.length], device)
            cache.put(row, new_cache)

    def choose_prefill_chunk(self, columns: int) -> int:
        """Return the number of new positions per forward of a prompt: `choose_chunk_beside` of the masked columns."""
        if self.tree_decoder.masks_last:
            return self.choose_chunk_beside(min(columns, 1))
        return self.choose_chunk_beside(columns)

    def choose_chunk_beside(self, columns: int) -> int:
        """Return the number of new positions per forward: a power of two (16 to 512) whose mask is small.

        Powers of two, because oneDNN caches memory for each shape.

        columns: that the mask covers besides the new ones.
        """
        recurrent = self.tree_decoder.recurrent
        if recurrent and not recurrent.continues and not columns:
            return 1024  # the layers take all later positions token by token
        room = max(16, min(512, self.mask_room // (columns + 512)))
        return 1 << (room.bit_length() - 1)
