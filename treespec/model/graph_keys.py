"""What a CUDA graph is recorded for, and which forwards it can serve."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treespec.model.cache_layer import TreeLayer


@dataclass(frozen=True)
class GraphVariant:
    """What a forward depends on besides its layers, inputs and masks.

    Attributes:
        rows: nodes of each text.
        written: columns that the forward writes.
        growable: what a graph may have more of than the forward: "texts", "rows". With "texts" all outputs are
            [B, ...]. With "rows" all inputs and outputs are [B, N, ...], and the forward writes N columns.
        settings: anything else; equal settings mean equal operations.
    """

    rows: int
    written: int
    growable: tuple[str, ...] = ()
    settings: Any = None


@dataclass(frozen=True)
class GraphKey:
    """What a graph was recorded for: a `GraphVariant` over one storage.

    Attributes:
        block: identities of the first layer's keys and values.
        texts: B of the graph.
        rows, written, growable, settings: as of the variant; `rows` and `written` may be larger.
    """

    block: tuple[int, ...]
    texts: int
    rows: int
    written: int
    growable: tuple[str, ...]
    settings: Any

    def can_serve(self, other: "GraphKey") -> bool:
        """Whether a graph with this key can run a forward that has the other key."""
        is_alike = (self.block, self.growable, self.settings) == (
            other.block,
            other.growable,
            other.settings,
        )
        has_texts = self.texts == other.texts
        if "texts" in self.growable:
            has_texts = self.texts >= other.texts
        has_rows = (self.rows, self.written) == (other.rows, other.written)
        if "rows" in self.growable:
            has_rows = has_rows or self.rows > other.rows
        return is_alike and has_texts and has_rows


def build_key(
    layers: Sequence[TreeLayer], batch: int, nodes: int, variant: GraphVariant
) -> GraphKey:
    """Build the key of a forward over B texts of N nodes, after reserving the columns that it writes.

    What may grow is rounded up to a power of two, so that few graphs serve all sizes. Three texts of five nodes:

        growable          ()    ("texts",)    ("texts", "rows")
        texts, rows      3, 5         4, 5                 4, 8     of a storage of four rows or more
    """
    rows = variant.rows
    written = variant.written
    if "rows" in variant.growable:
        rows = 1 << (nodes - 1).bit_length()
        written = rows
    for layer in layers:
        layer.reserve(layer.length + written)
    texts = batch
    if "texts" in variant.growable:
        texts = min(1 << (batch - 1).bit_length(), len(layers[0].allocation[0]))
    block = tuple(map(id, layers[0].allocation))
    return GraphKey(block, texts, rows, written, variant.growable, variant.settings)
