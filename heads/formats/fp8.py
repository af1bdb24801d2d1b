"""Weights in fp8 become floats when they are read: each is multiplied by its factors, which the file holds beside it.

A weight [out, in] has one factor, one for each row, or one for each block. By the shape of the factors:

    shape of factors      [] or [1]       [out] or [out, 1]      [blocks of rows, blocks of columns]
    weight [4, 6]         f f f f f f     f f f f f f            f f f g g g
                          f f f f f f     g g g g g g            f f f g g g      blocks of [2, 3]
                          f f f f f f     h h h h h h            h h h i i i
                          f f f f f f     i i i i i i            h h h i i i

Only config.json tells the size of a block. Factors of activations and of keys and values are dropped: a head computes
in floats. Read in compressed-tensors 0.20, transformers' fine-grained fp8 and vLLM's loaders, on 29 November 2026.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from treespec.heads.formats import fields
from treespec.heads.head import Config, Stored, Tensors

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FACTOR_SUFFIXES = ("_scale_inv", "_scale")  # both multiply, whatever the name says
DROPPED_FACTORS = re.compile(r"(.*\.)?(input|output|activation|q|k|v)_scale(_inv)?")
QUANTIZATION_FIELD = "quantization_config"
BLOCK_FIELD = "weight_block_size"
BLOCK_STRUCTURE_FIELD = "block_structure"  # compressed-tensors' name

WEIGHT_TABLE = fields.FieldTable(  # of compressed-tensors: how one group's weights are quantised
    used=frozenset((BLOCK_STRUCTURE_FIELD, "strategy")),
    unused=fields.split_names("observer observer_kwargs scale_dtype zp_dtype"),
    only={"num_bits": (8,), "type": ("float",), "symmetric": (True,), "dynamic": (False,)},
)
GROUP_TABLE = fields.FieldTable(
    unused=fields.split_names("targets input_activations output_activations"),
    only={"format": ("float-quantized", "naive-quantized")},
    nested={"weights": WEIGHT_TABLE},
)
QUANTIZATION_TABLE = fields.FieldTable(
    used=frozenset((BLOCK_FIELD, "config_groups")),
    unused=fields.split_names("""
    activation_scheme ignored_layers modules_to_not_convert ignore exclude_modules producer version
    quantization_status global_compression_ratio kv_cache_scheme kv_cache_quant_algo scale_fmt
    """),
    only={
        "quant_method": ("fp8", "compressed-tensors", "modelopt"),
        "quant_algo": ("FP8",),
        "fmt": ("e4m3", "e5m2"),
        "format": ("float-quantized", "naive-quantized"),
    },
)


def dequantize_head(config: Config, tensors: Tensors) -> Stored:
    """Turn the fp8 weights of a head into floats, and drop `quantization_config`. Other heads are unchanged.

    The weights get the dtype that most of the file's other floats have, or float32.
    Raises ValueError for another quantisation, and for a weight without its factors.
    """
    if not any(value.dtype in FP8_DTYPES for value in tensors.values()):
        return config, tensors
    quantization = fields.get_object(config, QUANTIZATION_FIELD)
    plain = dequantize_weights(tensors, read_block(quantization))
    rest = Counter(
        value.dtype
        for name, value in plain.items()
        if value is tensors[name] and value.is_floating_point()
    )
    dtype = torch.float32
    if rest:
        dtype = rest.most_common(1)[0][0]
    for name, value in plain.items():
        if value is not tensors[name]:
            plain[name] = value.to(dtype)
    return fields.drop_names(config, (QUANTIZATION_FIELD,)), plain


def read_block(quantization: Config) -> tuple[int, int] | None:
    """Read the size of a block, rows and columns; None if the config names none.

    Raises ValueError for a part that treespec does not compute, and for groups with different sizes.
    """
    QUANTIZATION_TABLE.check(quantization, f"{QUANTIZATION_FIELD}.")
    sizes = [quantization.get(BLOCK_FIELD)]
    for name, group in fields.get_object(quantization, "config_groups").items():
        path = f"{QUANTIZATION_FIELD}.config_groups.{name}"
        group_fields = fields.as_object(group, path)
        GROUP_TABLE.check(group_fields, f"{path}.")
        weights = fields.get_object(group_fields, "weights")
        sizes.append(weights.get(BLOCK_STRUCTURE_FIELD))
    blocks = {tuple(size) for size in sizes if size}
    if len(blocks) > 1 or any(map(is_no_block, blocks)):
        raise ValueError(
            f"{QUANTIZATION_FIELD} names blocks of {sorted(blocks, key=repr)}: one size is read"
        )
    if not blocks:
        return None
    rows, columns = blocks.pop()
    return rows, columns


def is_no_block(size: tuple[object, ...]) -> bool:
    """Whether a block's size is not two whole numbers, at least 1."""
    return len(size) != 2 or not all(type(length) is int and length > 0 for length in size)


def dequantize_weights(tensors: Mapping[str, Tensor], block: tuple[int, int] | None) -> Tensors:
    """Multiply fp8 weights by their factors, in float32; all other tensors stay as they are.

    Args:
        tensors: the tensors, and the factors of each weight under its name with `_scale` or `_scale_inv`.
        block: rows and columns that share a factor; None: not known.

    Returns:
        The tensors without the factors.

    Raises:
        ValueError: for a weight without factors, and for factors of another shape.
    """
    quantized = [name for name, value in tensors.items() if value.dtype in FP8_DTYPES]
    factor_names = {name: find_factors(name, tensors) for name in quantized}
    used = set(factor_names.values())
    plain: Tensors = {}
    for name, value in tensors.items():
        if name in factor_names:
            factors = tensors[factor_names[name]]
            plain[name] = value.float() * spread_factors(factors, value.shape, block, name)
        elif name not in used and not DROPPED_FACTORS.fullmatch(name):
            plain[name] = value
    return plain


def find_factors(name: str, tensors: Iterable[str]) -> str:
    """Find the name of a weight's factors. Raises ValueError unless there are just one."""
    names = [name + suffix for suffix in FACTOR_SUFFIXES]
    present = [factors for factors in tensors if factors in names]
    if len(present) != 1:
        raise ValueError(f"{name} is in fp8, and the file has not one of {' and '.join(names)}")
    return present[0]


def spread_factors(
    factors: Tensor, shape: torch.Size, block: tuple[int, int] | None, name: str
) -> Tensor:
    """Spread a weight's factors over its shape, in float32, so that both can be multiplied.

    Raises ValueError for factors that are no floats, or of another shape. name: the weight's, for the message.
    """
    if not factors.is_floating_point():
        raise ValueError(f"the factors of {name} are of {factors.dtype}: treespec reads floats")
    values = factors.float()
    if values.numel() == 1:
        return values.reshape(())
    if list(values.shape) in ([shape[0]], [shape[0], 1]):
        return values.reshape(-1, *[1] * (len(shape) - 1))
    if block is None or len(shape) != 2:
        raise ValueError(
            f"the factors of {name} are {list(values.shape)}, the weight is {list(shape)}: {BLOCK_FIELD} is missing in "
            f"{QUANTIZATION_FIELD}"
        )
    rows, columns = block
    if list(values.shape) != [-(-shape[0] // rows), -(-shape[1] // columns)]:
        raise ValueError(
            f"the factors of {name} are {list(values.shape)}, the weight is {list(shape)}, and blocks {list(block)}"
        )
    spread = values.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return spread[: shape[0], : shape[1]]
