"""The structures that the C kernels take, field by field, and the types of every kernel's parameters.

`check_abi` compares them with the compiled library, so that no call reads a field at another place.
"""

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

ABI_VERSION = (
    1  # of kernels.c and layer.c; both sides count it up when a structure or a parameter changes
)
LAYER_PRODUCTS = 7  # queries, keys, values, output, gate, up, down
LAYER_NORMS = 4  # before attention, before the MLP, of queries, of keys


class LinearStruct(ctypes.Structure):
    """A product by a packed weight: `Linear` of kernels.c."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),  # None: no bias
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("form", c_int),
        ("half", c_int),
        ("threads", c_int),
    ]


class AttentionStruct(ctypes.Structure):
    """Attention of all nodes of a forward: `Attention` of kernels.c. Strides are in numbers, not bytes."""

    _fields_ = [
        *((name, c_void_p) for name in ("query", "key", "value", "mask", "out", "sinks", "starts")),
        *((name, c_int64) for name in ("texts", "heads", "kv_heads", "nodes", "columns")),
        *((name, c_int64) for name in ("free_columns", "width", "value_width")),
        *((name, c_int64) for name in ("query_text", "query_head", "query_node")),
        *((name, c_int64) for name in ("key_text", "key_head", "key_column")),
        *((name, c_int64) for name in ("value_text", "value_head", "value_column")),
        *((name, c_int64) for name in ("mask_text", "mask_node")),
        ("scale", c_float),
        ("cap", c_float),
        ("half", c_int),
        ("threads", c_int),
    ]


class LayerStruct(ctypes.Structure):
    """A decoder layer and what it computes in one forward: `Layer` of layer.c."""

    _fields_ = [
        ("weights", c_void_p * LAYER_PRODUCTS),
        ("biases", c_void_p * LAYER_PRODUCTS),
        ("norms", c_void_p * LAYER_NORMS),
        *((name, c_void_p) for name in ("x", "residual", "cos", "sin", "mask")),
        *((name, c_void_p) for name in ("keys", "values", "out", "starts")),
        *((name, c_int64) for name in ("texts", "nodes", "inputs", "hidden", "heads")),
        *((name, c_int64) for name in ("kv_heads", "head_width", "inner", "angle_width")),
        *((name, c_int64) for name in ("columns", "capacity", "first", "free_columns")),
        *((name, c_int64) for name in ("angle_text", "angle_node", "mask_text", "mask_node")),
        ("scale", c_float),
        ("eps", c_float),
        ("sign", c_float),
        ("form", c_int),
        ("half", c_int),
        ("threads", c_int),
    ]


class HeadStepStruct(ctypes.Structure):
    """The weights of a draft head's step: `HeadStep` of layer.c."""

    _fields_ = [
        ("layer", LayerStruct),
        ("fc", LinearStruct),
        ("output", LinearStruct),
        ("embedding", c_void_p),
    ]


class HeadNodesStruct(ctypes.Structure):
    """The nodes of a draft head's step: `HeadNodes` of layer.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "parents", "positions", "starts", "drafted")),
        *((name, c_void_p) for name in ("vocabulary", "features", "cos", "sin", "mask")),
        *((name, c_void_p) for name in ("keys", "values", "states", "drafted_states", "logits")),
        *((name, c_int64) for name in ("texts", "nodes", "drafted_nodes", "angle_width")),
        *((name, c_int64) for name in ("columns", "capacity", "free_columns", "threads")),
    ]


KERNEL_STRUCTURES = (
    LinearStruct,
    AttentionStruct,
    LayerStruct,
    HeadStepStruct,
    HeadNodesStruct,
)  # as `describe_abi` of layer.c lists them

# The types of each kernel's parameters.
KERNEL_PARAMETERS: dict[str, list[Any]] = {
    # weight, packed weight; inputs, outputs; form
    "pack": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    # packed weight, weight; inputs, outputs; form
    "unpack": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    # the product; x, y; rows
    "linear": [ctypes.POINTER(LinearStruct), c_void_p, c_void_p, c_int64],
    "attention": [ctypes.POINTER(AttentionStruct)],
    # several layers, one after the other; their number
    "layers": [ctypes.POINTER(LayerStruct), c_int64],
    "head_step": [ctypes.POINTER(HeadStepStruct), ctypes.POINTER(HeadNodesStruct)],
    # x, weight, y; rows, width; epsilon, half, threads
    "rms_norm": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int, c_int],
    # states, y; rows, width; threads
    "noise": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    # logits, probabilities, tokens; rows, vocabulary, k; 1 / temperature, half, threads
    "rank": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int, c_int],
    # logits, noise; vocabulary; temperature, half
    "choose": [c_void_p, c_void_p, c_int64, c_float, c_int],
    # logits, noise, tokens, scores; rows, size; factor, temperature, half
    "score": [
        *(c_void_p, c_void_p, c_void_p, c_void_p),
        *(c_int64, c_int64, c_float, c_float, c_int),
    ],
    # addresses of blocks, moves; their numbers; heads, capacity, bytes, threads
    "copy_columns": [c_char_p, c_char_p, c_int64, c_int64, c_int64, c_int64, c_int64, c_int],
}


def declare_parameters(library: Any) -> None:
    """Gives every kernel of a loaded library the types of its parameters, and looks at what it returns."""
    for name, parameters in KERNEL_PARAMETERS.items():
        kernel = getattr(library, name)
        kernel.argtypes = parameters
        if name == "choose":  # it returns a token, and allocates nothing
            kernel.restype = c_int64
        else:
            kernel.errcheck = check_status


def check_status(status: int, *_: Any) -> int:
    """Raises MemoryError if a kernel had no memory for its intermediate results; then its outputs are of no use."""
    if status:
        raise MemoryError("the kernels could not allocate memory for a forward")
    return status


def check_abi(library: Any) -> None:
    """Raises OSError if a loaded library has other structures than this file, as an older one has."""
    describe = getattr(library, "describe_abi", None)
    if describe is None:
        raise OSError("the library of the kernels is older than this treespec")
    sizes = (c_int64 * len(KERNEL_STRUCTURES))()
    version = describe(sizes)
    expected = [ctypes.sizeof(structure) for structure in KERNEL_STRUCTURES]
    if version != ABI_VERSION or list(sizes) != expected:
        raise OSError(
            f"the library of the kernels has ABI {version} and structures of {list(sizes)} bytes, "
            f"this treespec ABI {ABI_VERSION} and {expected}"
        )
