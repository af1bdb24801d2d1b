"""Checksums inside the files that they protect, so that both are always written together.

A JSON object carries its checksum as one more field, a safetensors file as metadata of its header.
A file without one comes from another project or an older treespec, and is read as it is.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

FIELD = "checksum"


def of_fields(fields: Mapping[str, object]) -> str:
    """SHA-256 of a JSON object without its checksum, whatever the order of its fields."""
    content = {name: value for name, value in fields.items() if name != FIELD}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def of_tensors(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """SHA-256 of names, dtypes, shapes and bytes, and of the header's other metadata."""
    digest = hashlib.sha256(of_fields(metadata).encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def sealed(fields: Mapping[str, object]) -> dict[str, object]:
    """The same fields, the checksum last."""
    content = {name: value for name, value in fields.items() if name != FIELD}
    return {**content, FIELD: of_fields(content)}


def intact(fields: Mapping[str, object]) -> bool:
    """Whether a JSON object is what was written; True where it carries no checksum."""
    return fields.get(FIELD, of_fields(fields)) == of_fields(fields)
