"""Weights of a GGUF file that stay in its blocks: each forward unpacks them.

The layers here hold the same bytes as the file. A forward unpacks a part of a weight that fits the
processor's cache, multiplies by it and forgets it:

    weight    | rows 0-909 | rows 910-1819 | …      1.6 to 8.5 bits a weight
    unpacked  | one part   |                        in the dtype of the input
    output    | done       | to do         | …            576 inputs: 910 rows are 2 MB in float32

The products are those of the unpacked weight, so a tree's logits agree with a single token's as
closely as in a plain model of that dtype.

transformers 5.23 keeps the blocks of three architectures (Qwen3.5 and its mixture, LFM2), on devices
that it has a kernel for, and unpacks all other files when it loads them. For these others this
loader takes its names and its reordering of rows, and leaves the bytes as they are. Blocks that only
unpacking fits (experts of a mixture, fused or transposed matrices) are unpacked, one at a time.
"""

from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize, row_bytes
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.quantizers.quantizer_gguf import GgufHfQuantizer

PART = 1 << 19  # weights that are unpacked at a time: 2 MB in float32


@final
class BlockLinear(nn.Module):
    """`nn.Linear` for inference. weight: [out, bytes of a row] uint8, GGUF blocks."""

    def __init__(self, plain: nn.Linear, kind: int, dtype: torch.dtype) -> None:
        """kind: the type of the blocks, as GGUF numbers them."""
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.kind, self.bias = kind, plain.bias
        self.weight = _blocks(self.out_features, self.in_features, kind)

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


@final
class BlockEmbedding(nn.Module):
    """`nn.Embedding` for inference. weight: [V, bytes of a row] uint8, GGUF blocks."""

    def __init__(self, plain: nn.Embedding, kind: int, dtype: torch.dtype) -> None:
        """kind: as for `BlockLinear`. dtype: of the embeddings."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = plain.num_embeddings, plain.embedding_dim
        self.kind, self.dtype = kind, dtype
        self.weight = _blocks(self.num_embeddings, self.embedding_dim, kind)

    def forward(self, tokens: Tensor) -> Tensor:
        """[...] int64 -> [..., H]."""
        rows = self.weight[tokens.reshape(-1)]
        return dequantize(rows, self.kind, self.dtype).view(*tokens.shape, self.embedding_dim)


def _blocks(rows: int, width: int, kind: int) -> nn.Parameter:
    """Room for the blocks of a matrix [rows, width]."""
    empty = torch.empty(rows, row_bytes(kind, width), dtype=torch.uint8)
    return nn.Parameter(empty, requires_grad=False)


BLOCKS: dict[type, Any] = {nn.Linear: BlockLinear, nn.Embedding: BlockEmbedding}


@final
class BlockQuantizer(GgufHfQuantizer):
    """orders: for each weight that stays in blocks the order [out] of its rows in the file."""

    def __init__(self, quantization_config: Any, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.orders: dict[str, Tensor] = {}
        self.names: dict[str, str] = {}  # of the file -> of the model
        self.processor = TensorProcessor()
        self.keeps = False  # whether this file is read here, and not by transformers

    def read_header(self, gguf_file: str) -> None:
        super().read_header(gguf_file)
        if self.supported or self.quantization_config.dequantize:
            return
        try:
            self.header = GgufHeader.from_file(gguf_file)
            self.keeps = True
        except ValueError:  # types of blocks that only the gguf package unpacks
            return

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        return None if self.keeps else super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Put the layers of blocks into the model."""
        if not self.keeps:
            super()._process_model_before_weight_loading(model, **kwargs)
            return
        # 1. The names, and which matrices only have their rows reordered.
        processor = TENSOR_PROCESSORS.get(self.header.architecture, TensorProcessor)
        self.processor = processor(config=model.config.get_text_config().to_dict())
        self.names = get_gguf_hf_weights_map(model, self.processor)
        types: dict[str, int] = {}
        for tensor in self.header.tensors:
            name = self.names.get(tensor.name, "")
            place, _, last = name.rpartition(".")
            is_matrix = last == "weight" and type(model.get_submodule(place)) in BLOCKS
            if tensor.ggml_type not in GGML_BLOCK or not is_matrix:
                continue
            order = order_of_rows(self.processor, tensor.name, tensor.shape[0])
            if order is not None:
                self.orders[name], types[name] = order, tensor.ggml_type
        for tied, name in (model._tied_weights_keys or {}).items():
            if name in types and model.config.get_text_config().tie_word_embeddings:
                types.setdefault(tied, types[name])

        # 2. The layers, still without memory.
        for name, blocks in types.items():
            place = name.removesuffix(".weight")
            plain: Any = model.get_submodule(place)
            new = BLOCKS[type(plain)](plain, blocks, self.dtype or torch.float32)
            model.set_submodule(place, new)

    def get_state_dict(self, checkpoint_file: str, model: PreTrainedModel) -> dict[str, Any]:
        """The tensors by the model's names: blocks as bytes, all others in the model's dtype."""
        if not self.keeps:
            return super().get_state_dict(checkpoint_file, model)
        tensors: dict[str, Tensor] = {}
        for name, lazy in load_gguf_state_dict(self.header).items():
            own = self.names.get(name)
            if own in self.orders:
                tensors[own] = lazy[...][self.orders[own]]
                continue
            values = lazy[...]
            if lazy.ggml_type in GGML_BLOCK:
                values = dequantize(values, lazy.ggml_type).view(*values.shape[:-1], -1)
            done = self.processor.process(
                values.float().numpy(),
                name=name,
                tensor_key_mapping=self.names,
                parsed_parameters={
                    "tensors": tensors
                },  # a mixture's experts are put together there
            )
            if done.name in self.names:
                values = torch.from_numpy(np.array(done.weights))
                tensors[self.names[done.name]] = values.to(self.dtype)
        for name in tensors.keys() - self.orders.keys():
            tensors[name] = tensors[name].to(self.dtype)  # experts were put together in float32
        return tensors


def order_of_rows(processor: TensorProcessor, name: str, rows: int) -> Tensor | None:
    """The order [rows] in which a matrix of the file has the model's rows; None if more differs.

    A matrix of numbered rows goes through the processor that undoes llama.cpp's conversion.
    """
    numbered = np.arange(2.0 * rows).reshape(rows, 2)
    try:
        done = processor.process(numbered.copy(), name=name).weights
    except Exception:  # it cuts a matrix in ways that do not fit this one
        return None
    if done.shape != numbered.shape:
        return None
    order = done[:, 0].astype(np.int64) // 2
    is_reordered = np.array_equal(numbered[order.clip(0, rows - 1)], done)
    return torch.from_numpy(order) if is_reordered else None
