"""The seam of draft models: draft logits for tree nodes, a level at a time."""

from typing import Protocol

from torch import Tensor


class Proposer(Protocol):
    """Holds what it knows of one text. All calls of a cycle: begin, extend for each level, observe."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it wants as features; () is the last hidden state."""
        ...

    @property
    def length(self) -> int:
        """Positions of the text that it has observed."""
        ...

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each of its draft tokens; None where they are the same."""
        ...

    @property
    def forward_seconds(self) -> float:
        """Seconds spent in the draft model's own forwards so far."""
        ...

    def begin(self) -> Tensor | None:
        """[1, N] draft logits for the children of the root, or None if it knows nothing yet."""
        ...

    def extend(self, tokens: Tensor, parent_rows: Tensor) -> Tensor:
        """[F, N] draft logits for the children of F nodes.

        tokens: [F] draft tokens, numbered as the logits; parent_rows: [F] in the last frontier.
        """
        ...

    def observe(self, features: Tensor, following: Tensor) -> None:
        """Text was committed: features [n, H] of its next n positions, and the target's token [n] after each."""
        ...

    def rewind(self, length: int) -> None:
        """Keep only the first `length` observed positions."""
        ...
