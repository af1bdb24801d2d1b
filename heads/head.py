"""The seam of draft heads: what training and drafting may ask of a head of any kind."""

from collections.abc import Iterator
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from treespec.heads import checksum

Config = checksum.Fields  # of a config.json
Tensors = dict[str, Tensor]  # by name, as a checkpoint holds them
Stored = tuple[Config, Tensors]  # what a head's directory holds


class OutputPath(Protocol):
    """The part of the target that turns hidden states into logits."""

    def output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """[..., H] hidden states -> [..., V] logits; [..., N] with `output` from `output_rows`."""
        ...

    def output_rows(self, tokens: Tensor) -> nn.Linear:
        """A copy of the output embedding for the tokens [N] alone, H -> N."""
        ...


class Head(Protocol):
    """A `torch.nn.Module` that drafts for one target. Its shapes follow from its config."""

    known_as: ClassVar[str]  # in messages: "an EAGLE-3 head"
    optional: ClassVar[frozenset[str]]  # tensors a checkpoint may lack, as the target has them
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
        """The dtype of the features that it takes; its embedding may have the target's dtype."""
        ...

    @property
    def lacks_embedding(self) -> bool:
        """Whether its checkpoint has no embedding, and no target has given it one yet."""
        ...

    def settle_taps(self, layers: int) -> None:
        """If the config names no taps, take the published ones for a target of `layers` layers."""
        ...

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        """Take the target's embedding [V, E] in place of an equal copy of it, or of none.

        weight: its weight, or the module itself where that holds no plain matrix.
        """
        ...

    def restrict(self, tokens: Tensor, target: OutputPath) -> None:
        """Draft only these of the target's tokens from now on, [N] int64 ascending."""
        ...

    def fill(self, tensors: Tensors) -> None:
        """Take a checkpoint's tensors, whose names and shapes are right.

        Raises ValueError where they contradict each other.
        """
        ...

    # Of every `torch.nn.Module`.

    def state_dict(self) -> dict[str, Tensor]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def float(self) -> Self: ...

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Self: ...
