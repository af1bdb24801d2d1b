"""The seam of draft heads: what every kind offers to those who train it or draft with it."""

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

Config = dict[str, Any]  # the fields of a config.json
Tensors = dict[str, Tensor]  # by name, as a checkpoint holds them
Stored = tuple[Config, Tensors]  # what a head's directory holds


class OutputPath(Protocol):
    """The target's way from hidden states to logits, as far as a head uses it."""

    def output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """[..., H] hidden states -> [..., V] logits; [..., N] with `output` from `output_rows`."""
        ...

    def output_rows(self, tokens: Tensor) -> nn.Linear:
        """A copy of the output embedding for the tokens [N] alone, H -> N."""
        ...


class Head(Protocol):
    """A `torch.nn.Module` that drafts for one target. Its shapes follow from its config."""

    known_as: ClassVar[str]  # in messages: "an EAGLE-3 head"
    optional: ClassVar[
        frozenset[str]
    ]  # tensors that a checkpoint may lack, because the target has them
    config: Config  # the content of its config.json

    @property
    def kind(self) -> str:
        """Its name in `heads.registry`, and as `--drafter` and `--head` take it."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it takes as features; (): the state after the final norm."""
        ...

    @property
    def max_depth(self) -> int | None:
        """Levels that it can draft; None: any number."""
        ...

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""
        ...

    @property
    def vocab_size(self) -> int:
        """V of its target."""
        ...

    @property
    def hidden_size(self) -> int:
        """H, the width of the states that it computes."""
        ...

    @property
    def feature_size(self) -> int:
        """Width of the target's features, all taps together."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the features that it takes; its embedding may have the target's."""
        ...

    @property
    def lacks_embedding(self) -> bool:
        """Whether its checkpoint has no embedding, and no target has given it one yet."""
        ...

    def settle_taps(self, layers: int) -> None:
        """Where the config names no taps, take the published ones for `layers` target layers."""
        ...

    def share_embedding(self, weight: nn.Parameter) -> None:
        """Take the target's embedding [V, E] in place of an equal copy of it, or of none."""
        ...

    def restrict(self, tokens: Tensor, target: OutputPath) -> None:
        """From now on draft only these of the target's tokens, [N] int64 ascending."""
        ...

    def fill(self, tensors: Tensors) -> None:
        """Take a checkpoint's tensors, whose names and shapes are right.

        Raises ValueError where they contradict each other.
        """
        ...

    # As every `torch.nn.Module` has them.

    def state_dict(self) -> dict[str, Tensor]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def float(self) -> Self: ...

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self: ...
