"""The seam of draft heads: what training and drafting may ask of a head of any kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from treespec.files import checksum

Config = checksum.Fields  # of a config.json
Tensors = dict[str, Tensor]  # by name, as a checkpoint holds them
Stored = tuple[Config, Tensors]  # what a head's directory holds
Embed = Callable[[Tensor], Tensor]  # [...] tokens -> [..., H] embeddings

EMBEDDING = "embed_tokens.weight"


class OutputPath(Protocol):
    """The part of the target that turns hidden states into logits."""

    def output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """[..., H] hidden states -> [..., V] logits; [..., N] with `output` from `output_rows`."""
        ...

    def output_rows(self, tokens: Tensor) -> nn.Linear:
        """A copy of the output embedding for the tokens [N] alone, H -> N."""
        ...


class Head(nn.Module, ABC):
    """Drafts for one target. Its shapes follow from its config.

    kind: its name in `heads.registry`, and as `--drafter` and `--head` take it. known_as: in
    messages, such as "an EAGLE-3 head". optional: tensors a checkpoint may lack, as the target has
    them. config: the content of its config.json.
    taps: target layers whose inputs it takes as features; (): the state after the final norm.
    max_depth: levels that it can draft; None: any number. vocab_size: V of its target. hidden_size:
    H, the width of the states that it computes. feature_size: F, the width of the target's
    features, all taps together. restricted: [N] int64 the tokens of `restrict`, None before it.
    embed_tokens: of kinds with an embedding; None where the checkpoint has none and no target has
    given its own yet.
    """

    kind: str
    known_as: ClassVar[str]
    optional: ClassVar[frozenset[str]] = frozenset()
    config: Config
    taps: tuple[int, ...] = ()
    max_depth: int | None = None
    vocab_size: int
    hidden_size: int
    feature_size: int
    restricted: Tensor | None = None
    embed_tokens: nn.Module | None

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""
        return self.restricted

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features that it takes; its embedding may have the target's dtype."""
        return next(self.parameters()).dtype

    @property
    def lacks_embedding(self) -> bool:
        """Whether its checkpoint has no embedding, and no target has given it one yet."""
        return False

    def settle_taps(self, layers: int) -> None:
        """If the config names no taps, take the published ones for a target of `layers` layers."""

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        """Take the target's embedding [V, E] in place of an equal copy of it, or of none.

        weight: its weight, or the module itself where that holds no plain matrix.
        """

    @abstractmethod
    def restrict(self, tokens: Tensor, target: OutputPath) -> None:
        """Draft only these of the target's tokens from now on, [N] int64 ascending."""

    def fill(self, tensors: Tensors) -> None:
        """Take a checkpoint's tensors, whose names and shapes are right.

        Raises ValueError where they contradict each other.
        """
        if EMBEDDING in self.optional - tensors.keys():
            self.embed_tokens = None
        self.load_state_dict(tensors, assign=True)
