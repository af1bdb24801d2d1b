"""Checksums inside the files that they protect, so that both are written together.

A JSON object carries its checksum as one more field, a safetensors file as metadata of its header.
A file without a checksum comes from another project, and passes.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "checksum"
Fields = dict[str, Any]  # a JSON object


def of_fields(fields: Mapping[str, object]) -> str:
    """SHA-256 of a JSON object without its checksum, whatever the order of its fields."""
    content = {name: value for name, value in fields.items() if name != FIELD}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def of_tensors(tensors: Mapping[str, "Tensor"], metadata: Mapping[str, str]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, and of the header's other metadata."""
    from torch import uint8  # the checksums of JSON do without torch

    digest = hashlib.sha256(of_fields(metadata).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.flatten().view(uint8).numpy().data)
    return digest.hexdigest()


def sealed(fields: Mapping[str, object]) -> dict[str, object]:
    """The same fields, and the checksum as the last."""
    content = {name: value for name, value in fields.items() if name != FIELD}
    return {**content, FIELD: of_fields(content)}


def unsealed(text: str | bytes, foreign: bool = False) -> Fields:
    """The fields of a JSON object without its checksum.

    foreign: whether it may lack one. Raises ValueError or RecursionError for a damaged one.
    """
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object")
    own = of_fields(fields)
    if fields.pop(FIELD, own if foreign else None) != own:
        raise ValueError("its checksum does not match")
    return fields
