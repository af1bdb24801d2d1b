"""The structures that the C kernels take, field by field, and the types of every kernel's parameters.

`check_abi` compares them with the compiled library, so that no call reads a field at another place.
"""

import ctypes
from ctypes import c_char_p, c_float, c_int, c_int64, c_void_p
from typing import Any

# Of kernels.c and layer.c; both sides count it up when a structure or a parameter changes.
ABI_VERSION = 8
LAYER_PRODUCTS = 7  # queries, keys, values, output, gate, up, down
LAYER_NORMS = 4  # before attention, before the MLP, of queries, of keys
HEAD_NORMS = 3  # of embeddings, of features, of states


def list_fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Lists fields of one type. names: of the fields, with spaces between them."""
    return [(name, kind) for name in names.split()]


class LinearStruct(ctypes.Structure):
    """A product by a packed weight: `Linear` of kernels.c. `bias` None: no bias. `row` 0: rows lie dense."""

    _fields_ = (
        list_fields(c_void_p, "weight bias")
        + list_fields(c_int64, "inputs outputs")
        + list_fields(c_int, "form half threads")
        + list_fields(c_int64, "row")
    )


class AttentionStruct(ctypes.Structure):
    """Attention of all nodes of a forward: `Attention` of kernels.c. Strides are in numbers, not bytes."""

    _fields_ = (
        list_fields(c_void_p, "query key value mask out sinks starts")
        + list_fields(c_int64, "texts heads kv_heads nodes columns free_columns width value_width")
        + list_fields(c_int64, "query_text query_head query_node key_text key_head key_column")
        + list_fields(c_int64, "value_text value_head value_column mask_text mask_node")
        + list_fields(c_float, "scale cap")
        + list_fields(c_int, "half threads")
    )


class LayerStruct(ctypes.Structure):
    """A decoder layer: `Layer` of layer.c."""

    _fields_ = (
        list_fields(c_void_p * LAYER_PRODUCTS, "weights biases")
        + list_fields(c_void_p * LAYER_NORMS, "norms")
        + list_fields(c_int64, "inputs hidden heads kv_heads head_width inner")
        + list_fields(c_float, "scale eps sign")
        + list_fields(c_int * LAYER_PRODUCTS, "forms")
        + list_fields(c_int, "half")
    )


class CacheStruct(ctypes.Structure):
    """A layer's cache in a forward: `Cache` of layer.c."""

    _fields_ = list_fields(c_void_p, "keys values") + list_fields(c_int64, "columns capacity first")


CACHE_FORMAT = "PPqqq"  # its fields for the module `struct`


class ForwardStruct(ctypes.Structure):
    """What the layers of a forward share: `Forward` of layer.c. Strides are in numbers, not bytes."""

    _fields_ = (
        list_fields(c_void_p, "x residual cos sin mask out starts")
        + list_fields(c_int64, "texts nodes angle_width masked_columns")
        + list_fields(c_int64, "angle_text angle_node mask_text mask_node")
        + list_fields(c_int, "threads")
    )


class HeadStepStruct(ctypes.Structure):
    """The weights of a draft head's step: `HeadStep` of layer.c."""

    _fields_ = (
        list_fields(LayerStruct, "layer")
        + list_fields(LinearStruct, "fc output embedding")
        + list_fields(c_void_p * HEAD_NORMS, "norms")
        + list_fields(c_int64, "adds_normed_feature returns_normed_states")
    )


class HeadNodesStruct(ctypes.Structure):
    """The nodes of a draft head's step: `HeadNodes` of layer.c."""

    _fields_ = (
        list_fields(c_void_p, "tokens parents positions starts drafted vocabulary own own_tokens")
        + list_fields(c_void_p, "features cos sin mask keys values states drafted_states logits")
        + list_fields(c_int64, "texts nodes drafted_nodes angle_width columns capacity")
        + list_fields(c_int64, "first_column free_columns threads")
    )


KERNEL_STRUCTURES = (
    LinearStruct,
    AttentionStruct,
    LayerStruct,
    CacheStruct,
    ForwardStruct,
    HeadStepStruct,
    HeadNodesStruct,
)  # as `describe_abi` of layer.c lists them

# The types of each kernel's parameters.
KERNEL_PARAMETERS: dict[str, list[Any]] = {
    # weight, packed weight; inputs, outputs; form
    "pack": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    # packed weight, weight; inputs, outputs; form
    "unpack": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    # blocks, packed weight; inputs, outputs; form
    "pack_eights": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    # packed weight, blocks; inputs, outputs; form
    "unpack_eights": [c_void_p, c_void_p, c_int64, c_int64, c_int],
    # packed weight, another one; outputs, places; their number; inputs, outputs of each weight; form
    "copy_outputs": [c_void_p] * 4 + [c_int64] * 4 + [c_int],
    # packed weight, outputs, rows; their number; inputs, outputs of the weight; form, half, threads
    "read_outputs": [c_void_p] * 3 + [c_int64] * 3 + [c_int] * 3,
    # the product; x, y; rows
    "linear": [ctypes.POINTER(LinearStruct), c_void_p, c_void_p, c_int64],
    "attention": [ctypes.POINTER(AttentionStruct)],
    # several layers, one after the other; their caches; their number; what they share
    "layers": [
        ctypes.POINTER(LayerStruct),
        c_char_p,
        c_int64,
        ctypes.POINTER(ForwardStruct),
    ],
    "head_step": [ctypes.POINTER(HeadStepStruct), ctypes.POINTER(HeadNodesStruct)],
    # x, weight, y; rows, width; epsilon, half, threads
    "rms_norm": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_int, c_int],
    # states, tokens, y; rows, width; threads
    "noise": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int],
    # logits, probabilities, tokens; rows, vocabulary, k; 1 / temperature, half, threads
    "rank": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int, c_int],
    # logits, state of the noise; vocabulary; temperature, half, threads
    "choose": [c_void_p, c_void_p, c_int64, c_float, c_int, c_int],
    # logits, noise, scores; rows, size; factor, temperature, half
    "score": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float, c_float, c_int],
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
