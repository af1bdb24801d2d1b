"""DFlash 2 (Inco AI, z-lab, August 2026): DFlash with convolutions over the block, and candidates rescored in pairs.

Around each attention and each MLP of a layer stands a convolution over the rows of the block, with kernels of size K
and coefficients that the sublayer's input adjusts, the same for all channels c of a group g:

    out_t,c = sum over k < K of (base_k,c + delta_t,k,g) x_(t-k),c              x before the block is 0

The selector keeps the C tokens b of largest draft logits U in each level, and scores them after the token a above:

    U(b) + (A[a] * P h) . B[b]                 h: the level's state of the block; A, B: of rank r
"""

from typing import Any, ClassVar, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from treespec.heads.conditional import (
    ConditionalBlockHead,
    read_count,
    select_candidates,
    spread_candidates,
)
from treespec.heads.dflash import BlockRows
from treespec.heads.head import Config, Embed, TargetFacts, TargetOutputPath
from treespec.heads.layers import Attend, Layer


class Convolved(NamedTuple):
    """What `BlockConvolution.enter` returns.

    Attributes:
        rows: the sublayer's input, of the shape of the rows.
        deltas: [S, ..., K, G] for `BlockConvolution.leave`.
    """

    rows: Tensor
    deltas: Tensor


@final
class BlockConvolution(nn.Module):
    """The convolutions before and behind a sublayer, with the published parameter names.

    Args:
        width: H.
        kernel_size: K.
        group: the number of channels that share coefficients. Raises ValueError unless it divides H.
    """

    def __init__(self, width: int, kernel_size: int, group: int) -> None:
        super().__init__()
        if width % group:
            raise ValueError(f"conv_group_size is {group}, must divide hidden_size, {width}")
        self.kernel_size = kernel_size
        self.groups = width // group
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, width))
        self.base_kernel.data[:, 0] = 1.0  # of a new head: the input itself
        self.kernel_projection = nn.Linear(width, 2 * kernel_size * self.groups, bias=False)

    def enter(self, x: Tensor, blocks: BlockRows) -> Convolved:
        """Convolve a sublayer's input."""
        slots = blocks.split(x)
        deltas = self.kernel_projection(slots).unflatten(-1, (2, self.kernel_size, self.groups))
        convolved = self.apply_kernel(slots, deltas[..., 0, :, :], self.base_kernel[0])
        return Convolved(blocks.join(convolved), deltas[..., 1, :, :])

    def leave(self, x: Tensor, deltas: Tensor, blocks: BlockRows) -> Tensor:
        """Convolve a sublayer's output. deltas: of `enter`."""
        return blocks.join(self.apply_kernel(blocks.split(x), deltas, self.base_kernel[1]))

    def apply_kernel(self, slots: Tensor, deltas: Tensor, base: Tensor) -> Tensor:
        """Convolve over the slots [S, ..., H]. deltas: [S, ..., K, G]. base: [K, H]."""
        grouped = slots.unflatten(-1, (self.groups, -1))
        kernel = base.unflatten(-1, (self.groups, -1))
        total = torch.zeros_like(grouped)
        for offset in range(self.kernel_size):
            before = grouped.new_zeros(offset, *grouped.shape[1:])
            shifted = torch.cat([before, grouped])[: len(grouped)]
            total = total + (kernel[offset] + deltas[..., offset, :, None]) * shifted
        return total.flatten(-2)


@final
class DFlash2Layer(Layer):
    """Qwen3's layer with convolutions. `DFlash2Head.apply_layer` computes it; its own forward leaves them out."""

    def __init__(self, layer: Layer, width: int, kernel_size: int, group: int) -> None:
        nn.Module.__init__(self)
        for name, module in layer.named_children():
            self.add_module(name, module)
        self.attention_conv = BlockConvolution(width, kernel_size, group)
        self.mlp_conv = BlockConvolution(width, kernel_size, group)


@final
class CandidateSelector(nn.Module):
    """Scores candidates after the token above. Its codebooks are A, [V, r], and B, [N, r]."""

    def __init__(self, vocab_size: int, drafted: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocab_size, rank)
        self.successor_codebook = nn.Embedding(drafted, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        nn.init.zeros_(self.successor_codebook.weight)  # a new head ranks candidates as DFlash


@final
class DFlash2Head(ConditionalBlockHead):
    """DFlash 2's head, with the published parameter names, and `.weight` behind those of the codebooks.

    config: DFlash's fields, and
    - `conv_kernel_size`: K; `conv_group_size`: the number of channels in a group.
    - `selector_rank`: r; `selector_top_k`: C.
    """

    kind: str = "dflash2"
    known_as: ClassVar[str] = "a DFlash 2 head"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = self.hidden_size
        kernel_size = read_count(config, "conv_kernel_size")
        group = read_count(config, "conv_group_size")
        self.layers = nn.ModuleList(
            DFlash2Layer(cast(Layer, layer), width, kernel_size, group) for layer in self.layers
        )
        self.latent_size = read_count(config, "selector_rank")
        self.candidates = read_count(config, "selector_top_k")
        drafted = self.vocab_size
        if self.lm_head is not None:
            drafted = self.lm_head.out_features
        self.candidate_selector = CandidateSelector(
            self.vocab_size, drafted, width, self.latent_size
        )

    @classmethod
    def build_config(cls, target: TargetFacts, levels: int = 7, **fields: Any) -> Config:
        sizes = {"conv_kernel_size": 2, "selector_rank": 256, "selector_top_k": 16}
        group = next(size for size in (16, 8, 4, 2, 1) if target.feature_width % size == 0)
        sizes["conv_group_size"] = group
        return super().build_config(target, levels, **sizes | fields)

    @property
    def drafted_rows(self) -> list[nn.Module]:
        return [self.candidate_selector.successor_codebook]

    @property
    def token_rows(self) -> list[nn.Module]:
        return [self.candidate_selector.predecessor_codebook]

    def apply_layer(self, number: int, x: Tensor, attend: Attend, blocks: BlockRows) -> Tensor:
        layer = cast(DFlash2Layer, self.layers[number])
        inputs = layer.attention_conv.enter(layer.input_layernorm(x), blocks)
        x = x + layer.attention_conv.leave(attend(inputs.rows), inputs.deltas, blocks)
        inputs = layer.mlp_conv.enter(layer.post_attention_layernorm(x), blocks)
        return x + layer.mlp_conv.leave(layer.mlp(inputs.rows), inputs.deltas, blocks)

    def read_parents(
        self, hidden: Tensor, tokens: Tensor, memory: Tensor, level: int, embed: Embed
    ) -> tuple[Tensor, Tensor]:
        selector = self.candidate_selector
        return selector.predecessor_codebook(tokens) * selector.hidden_projection(hidden), memory

    def adjust_logits(
        self, logits: Tensor, latent: Tensor, target: TargetOutputPath | None
    ) -> Tensor:
        values, tokens = select_candidates(logits, self.candidates)
        successors = self.candidate_selector.successor_codebook(tokens)  # [..., C, r]
        scores = values + (successors * latent[..., None, :]).sum(-1)
        return spread_candidates(scores, tokens, logits.shape[-1])
