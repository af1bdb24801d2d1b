"""The tensors of a GGUF file as it stores them (version 2 and 3, little-endian).

    GGUF version | number of tensors, of fields | field … | tensor: name, sizes, kind, offset … | padding | bytes …

transformers loads models from such files, but gives no tensor's bytes. Of the fields only the alignment is read:
vocabularies have hundreds of thousands of strings.
"""

import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Kinds of tensors, as GGUF numbers them.
GGUF_F32 = 0
GGUF_F16 = 1
GGUF_Q4_0 = 2
GGUF_Q4_1 = 3
GGUF_Q8_0 = 8
GGUF_BF16 = 30
FLOAT_KINDS = {GGUF_F32, GGUF_F16, GGUF_BF16}
KIND_BYTES = {  # numbers of a block, and its bytes
    GGUF_F32: (1, 4),
    GGUF_F16: (1, 2),
    GGUF_BF16: (1, 2),
    GGUF_Q4_0: (32, 18),
    GGUF_Q4_1: (32, 20),
    GGUF_Q8_0: (32, 34),
}
# types of fields -> their bytes; the others are strings and arrays
FIELD_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING_FIELD = 8
UINT32_FIELD = 4
ALIGNMENT_FIELD = b"general.alignment"
DEFAULT_ALIGNMENT = 32
HEADER_BYTES = 24


class StoredTensor(NamedTuple):
    """A tensor of a GGUF file.

    Attributes:
        name: in the file.
        shape: in torch's order.
        kind: as GGUF numbers it.
        data: its bytes, [bytes] uint8, mapped; None for a kind that `KIND_BYTES` has not.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    data: np.ndarray | None


def map_gguf_tensors(file: Path) -> list[StoredTensor]:
    """Map the tensors of a GGUF file that transformers could load. No tensor's bytes are read yet."""
    # 1. The fields.
    content = np.memmap(file, dtype=np.uint8, mode="c")  # torch warns of "r"
    reader = GgufReader(content)
    tensor_count, field_count = struct.unpack_from("<QQ", content.data, 8)
    for _ in range(field_count):
        reader.skip_field()

    # 2. The table.
    entries = [reader.read_entry() for _ in range(tensor_count)]

    # 3. The bytes.
    start = -(-reader.position // reader.alignment) * reader.alignment
    tensors = []
    for name, shape, kind, offset in entries:
        data = None
        if kind in KIND_BYTES:
            numbers, size = KIND_BYTES[kind]
            begin = start + offset
            data = content[begin : begin + prod(shape) // numbers * size]
        tensors.append(StoredTensor(name, shape, kind, data))
    return tensors


class GgufReader:
    """Reads a GGUF file's fields and table, one after the other.

    Attributes:
        content: the file's bytes.
        position: of the next byte.
        alignment: of the tensors' bytes.
    """

    def __init__(self, content: np.ndarray) -> None:
        self.content = content
        self.position = HEADER_BYTES
        self.alignment = DEFAULT_ALIGNMENT

    def read_number(self, code: str) -> int:
        """Read a number. code: its format for `struct`."""
        (number,) = struct.unpack_from(f"<{code}", self.content.data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return int(number)

    def read_string(self) -> bytes:
        """Read a string: its length and its bytes."""
        length = self.read_number("Q")
        self.position += length
        return self.content[self.position - length : self.position].tobytes()

    def skip_field(self) -> None:
        """Skip a field: name, type and value; keep the alignment."""
        name = self.read_string()
        kind = self.read_number("I")
        if name == ALIGNMENT_FIELD and kind == UINT32_FIELD:
            self.alignment = self.read_number("I")
            return
        self.skip_value(kind)

    def skip_value(self, kind: int) -> None:
        """Skip a value of a field's type: of an array, its elements' type, their number, and the elements."""
        if kind in FIELD_BYTES:
            self.position += FIELD_BYTES[kind]
            return
        if kind == STRING_FIELD:
            length = self.read_number("Q")
            self.position += length
            return
        element_kind = self.read_number("I")
        count = self.read_number("Q")
        if element_kind in FIELD_BYTES:
            self.position += FIELD_BYTES[element_kind] * count
            return
        for _ in range(count):
            self.skip_value(element_kind)

    def read_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read a line of the table. Returns name, shape in torch's order, kind, and offset."""
        name = self.read_string().decode()
        dimensions = self.read_number("I")
        shape = [self.read_number("Q") for _ in range(dimensions)]
        kind = self.read_number("I")
        offset = self.read_number("Q")
        return name, tuple(reversed(shape)), kind, offset
