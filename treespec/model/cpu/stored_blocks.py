"""Packs the products of a model from a GGUF file by the blocks that the file stores.

transformers loads the model and unpacks every tensor to floats. A product is packed from the file's blocks if their
values are the floats that transformers loaded, so no table of names is needed, and no architecture can be mistaken:

    the product's tensor is                 it is multiplied
    Q8_0, Q4_0 or Q4_1                      as it is stored
    quantised otherwise (Q6_K, Q5_0, …)     rounded to Q8_0
    F32, F16 or BF16                        as it is, in floats
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from treespec.kernels.checks import KernelInputError
from treespec.kernels.eight_bits import dequantize_blocks
from treespec.kernels.library import find_kernels
from treespec.kernels.ops import BLOCK_BYTES, CPU_DEVICE, FLOAT_FORMS, Q4_0, Q4_1, Q8_0
from treespec.model.cpu.eight_bits import BLOCK_NUMBERS, list_input_widths, quantize_layer
from treespec.model.cpu.packed_embedding import replace_products
from treespec.model.cpu.packed_layers import PackedLinear

# GGUF's names of formats -> the kernels' forms, torch's dtypes
BLOCK_FORMS = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

COMPARED_ROWS = 4096  # of a weight and of the file, unpacked at a time


@dataclass(frozen=True)
class StoredWeight:
    """A matrix of a GGUF file.

    Attributes:
        form: of its blocks, Q8_0, Q4_0 or Q4_1; None: floats.
        data: [out, bytes] uint8, in the file.
        dtype: of floats; None: blocks.
    """

    form: int | None
    data: np.ndarray
    dtype: torch.dtype | None = None

    def read_rows(self, rows: slice) -> Tensor:
        """Copy some rows out of the file: blocks [n, in / 32, bytes] uint8, or floats [n, in]."""
        data = torch.from_numpy(np.array(self.data[rows]))
        if self.form is None:
            assert self.dtype is not None
            return data.view(self.dtype)
        return data.unflatten(1, (-1, BLOCK_BYTES[self.form]))

    def read_values(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return the values [n, in] of some rows as transformers unpacks them."""
        values = self.read_rows(rows)
        if self.form is not None:
            values = dequantize_blocks(values, self.form)
        return values.to(dtype)


@torch.no_grad()
def pack_stored_products(model: nn.Module, file: Path) -> None:
    """Pack the products of a model on a CPU as the table above says; without the kernels, or in a file of floats, none.

    model: as transformers loaded it from the file.
    """
    dtypes = {weight.dtype for weight in model.parameters() if weight.is_cpu}
    if not dtypes or find_kernels().library is None or find_spec("gguf") is None:
        return
    import gguf

    package: Any = gguf
    reader = package.GGUFReader(str(file))  # `share_gguf_reader` has parsed the file already
    tensors = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    if {tensor.tensor_type.name for tensor in tensors} <= FLOAT_DTYPES.keys():
        return
    weights = index_weights(tensors, dtypes)
    replace_products(model, lambda layer, _: pack_stored_product(layer, weights))


def index_weights(
    tensors: Iterable[Any], dtypes: set[torch.dtype]
) -> dict[bytes, list[StoredWeight]]:
    """Return the matrices among a file's tensors, by the bytes of their first row's values in each of the dtypes.

    tensors: of gguf's reader. Those in other formats than `BLOCK_FORMS` and `FLOAT_DTYPES` are left out.
    """
    weights = defaultdict[bytes, list[StoredWeight]](list)
    for tensor in tensors:
        name = tensor.tensor_type.name
        if len(tensor.shape) != 2 or name not in BLOCK_FORMS | FLOAT_DTYPES:
            continue
        weight = read_stored_weight(tensor, name)
        for dtype in dtypes:
            weights[hash_row(weight.read_values(slice(1), dtype))].append(weight)
    return dict(weights)


def read_stored_weight(tensor: Any, name: str) -> StoredWeight:
    """Return a matrix of a GGUF file. tensor: of gguf's reader. name: of its format."""
    _, outputs = map(int, tensor.shape)  # GGUF lists the innermost size first
    data = tensor.data.view(np.uint8).reshape(outputs, -1)
    form = BLOCK_FORMS.get(name)
    if form is None:
        return StoredWeight(None, data, FLOAT_DTYPES[name])
    return StoredWeight(form, data)


def pack_stored_product(layer: Any, weights: dict[bytes, list[StoredWeight]]) -> nn.Module:
    """Return a product packed as its tensor is stored, or the layer itself: experts, whose products are then packed,
    and layers of floats.

    weights: the file's, as `index_weights` gives them.
    """
    widths = list_input_widths(layer)
    if not widths or any(inputs % BLOCK_NUMBERS for inputs in widths):
        return layer
    if type(layer) is nn.Linear and layer.weight.dtype in FLOAT_FORMS:
        for stored in weights.get(hash_row(layer.weight[:1]), []):
            rows = match_rows(stored, layer.weight)
            if rows is None:
                continue
            if stored.form is None:
                return layer
            return PackedLinear(layer.weight, layer.bias, stored.form, rows)
    try:
        return quantize_layer(layer, Q8_0)
    except KernelInputError:  # infinite numbers, or of a dtype that the kernels do not take
        return layer


def match_rows(stored: StoredWeight, weight: Tensor) -> Tensor | None:
    """Return the rows of a stored matrix in the order of a weight [out, in]; None if they have other values.

    llama.cpp's converter puts the rows of some projections in another order, which transformers undoes.
    """
    if len(stored.data) != len(weight):
        return None
    every_row = slice(None)

    # 1. The same rows, a few thousand at a time: the floats of a whole output layer take memory and time.
    ranges = [slice(first, first + COMPARED_ROWS) for first in range(0, len(weight), COMPARED_ROWS)]
    if all(torch.equal(stored.read_values(rows, weight.dtype), weight[rows]) for rows in ranges):
        return stored.read_rows(every_row)

    # 2. The same rows in another order.
    values = stored.read_values(every_row, weight.dtype)
    places = {hash_row(row): place for place, row in enumerate(values)}
    order = [places.get(hash_row(row), -1) for row in weight.detach()]
    if min(order) < 0:
        return None
    return stored.read_rows(every_row)[torch.tensor(order, dtype=torch.int64, device=CPU_DEVICE)]


def hash_row(row: Tensor) -> bytes:
    """Return the bytes of a row's values, as a key."""
    return row.detach().contiguous().view(torch.uint8).numpy().tobytes()
