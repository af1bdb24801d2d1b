"""MTP layers: the layers of a checkpoint that predict the tokens after the next (2412.19437).

A layer takes the target's last hidden state at position t, after its final norm, with the embedding
of token t + 1. It gives the state that the output embedding turns into the logits of token t + 2.
A second layer takes the first one's states, and so on. Five tokens, two layers:

    position         0     1     2     3     4
    token            a     b     c     d     e
    target           h0    h1    h2    h3    .
    layer 0 sees     .     h0,b  h1,c  h2,d  h3,e       at the token's own column
    layer 0 gives    .     u1    u2    u3    u4         u4 drafts the token after e
    layer 1 sees     .     .     u1,c  u2,d  u3,e
    layer 1 gives    .     .     v2    v3    v4         v4 has seen e, and drafts two after it

To draft deeper than it has layers, a checkpoint's last layer takes its own states.
"""

from collections.abc import Callable
from typing import Any, cast, final

import torch
from torch import Tensor, nn


@final
class MtpLayer(nn.Module):
    """A decoder layer of the target's own class, over embedding and hidden state side by side.

    embedding_first: their order (`Layout`). embedding, head: the layer's own, where its checkpoint
    has other ones than the target.
    """

    def __init__(
        self, width: int, norm: Callable[[], nn.Module], block: nn.Module, embedding_first: bool
    ) -> None:
        """width: H. norm: makes a norm of width H as the target has it."""
        super().__init__()
        self.token_norm, self.hidden_norm, self.final_norm = norm(), norm(), norm()
        self.project = nn.Linear(2 * width, width, bias=False)
        self.block, self.embedding_first = block, embedding_first
        self.embedding: nn.Embedding | None = None
        self.head: nn.Linear | None = None

    def forward(self, embeddings: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """[B, T, H] embeddings and hidden states -> [B, T, H] the states of the next step.

        options: of the decoder layer: mask, positions and cache.
        """
        both = [self.token_norm(embeddings), self.hidden_norm(hidden)]
        x = self.project(torch.cat(both if self.embedding_first else both[::-1], dim=-1))
        out = self.block(x, **options)
        return self.final_norm(out[0] if isinstance(out, tuple) else out)


@final
class Mtp(nn.Module):
    """The MTP layers of a target. kind: their layer type, a key of the target's windows."""

    def __init__(self, layers: list[MtpLayer], kind: str) -> None:
        super().__init__()
        self.layers, self.kind = nn.ModuleList(layers), kind
        for number, layer in enumerate(layers):  # its place in the cache
            for module in layer.modules():
                if "layer_idx" in vars(module):
                    vars(module)["layer_idx"] = number

    def __len__(self) -> int:
        return len(self.layers)

    def layer(self, number: int) -> MtpLayer:
        return cast(MtpLayer, self.layers[number])
