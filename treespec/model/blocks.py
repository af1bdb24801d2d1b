"""Weights of a GGUF file that stay in its blocks: each forward unpacks them.

The layers here hold the same bytes as the file. A forward unpacks a part of a weight that fits the
processor's cache, multiplies by it and forgets it:

    weight    | rows 0-909 | rows 910-1819 | …      1.6 to 8.5 bits a weight
    unpacked  | one part   |                        in the dtype of the input
    output    | done       | to do         | …            576 inputs: 910 rows are 2 MB in float32

The products are those of the unpacked weight, so a tree's logits agree with a single token's as
closely as in a plain model of that dtype.
"""

from typing import final

import torch
from torch import Tensor, nn
from transformers.integrations.gguf.dequant import dequantize, row_bytes

PART = 1 << 19  # weights that are unpacked at a time: 2 MB in float32


@final
class BlockLinear(nn.Module):
    """`nn.Linear` for inference. weight: [out, bytes of a row] uint8, GGUF blocks."""

    def __init__(self, in_features: int, out_features: int, kind: int, bias: bool) -> None:
        """kind: the type of the blocks, as GGUF numbers them."""
        super().__init__()
        self.in_features, self.out_features, self.kind = in_features, out_features, kind
        self.weight = _blocks(out_features, in_features, kind)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, self.in_features)
        output = x.new_empty(len(rows), self.out_features)
        step = max(1, PART // self.in_features)
        for start in range(0, self.out_features, step):
            part = slice(start, start + step)
            unpacked = dequantize(self.weight[part], self.kind, x.dtype)
            output[:, part] = rows @ unpacked.view(-1, self.in_features).T
        if self.bias is not None:
            output += self.bias
        return output.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


@final
class BlockEmbedding(nn.Module):
    """`nn.Embedding` for inference. weight: [V, bytes of a row] uint8, GGUF blocks."""

    def __init__(self, count: int, width: int, kind: int, dtype: torch.dtype) -> None:
        """kind: as for `BlockLinear`. dtype: of the embeddings."""
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.kind, self.dtype = count, width, kind, dtype
        self.weight = _blocks(count, width, kind)

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        rows = self.weight[tokens.reshape(-1)]
        return dequantize(rows, self.kind, self.dtype).view(*tokens.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, kind={self.kind}"


def _blocks(rows: int, width: int, kind: int) -> nn.Parameter:
    """Room for the blocks of a matrix [rows, width]."""
    empty = torch.empty(rows, row_bytes(kind, width), dtype=torch.uint8)
    return nn.Parameter(empty, requires_grad=False)
