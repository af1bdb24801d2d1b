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
        """Take the target's embedding [V, E] instead of an equal copy of it, or of none.

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


class MappedHead(Head):
    """A head that may have an output layer of its own, `lm_head`, with d2t and t2d for its rows.

    d2t [Vd] int64 says that draft token i is the target's i + d2t[i], and t2d [V] bool marks these,
    by their published names. They are saved with an output layer of the head's own.
    output: rows of the target's output embedding, for a head without one that drafts few tokens.
    """

    lm_head: nn.Linear | None
    output: nn.Module | None
    d2t: Tensor | None
    t2d: Tensor | None

    @property
    def vocabulary(self) -> Tensor | None:
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def restrict(self, tokens: Tensor, target: OutputPath | None = None) -> None:
        """Draft only these tokens from now on, [N] int64 ascending: cut lm_head, d2t and t2d."""
        drafted, layer = self.vocabulary, self.lm_head
        rows = tokens if drafted is None else torch.isin(drafted, tokens).nonzero().squeeze(1)
        kept = rows if drafted is None else drafted[rows]
        if layer is not None:
            cut = nn.Linear(layer.in_features, len(rows), bias=False, device="meta")
            cut.weight = nn.Parameter(layer.weight.detach()[rows])
            self.lm_head, self.config = cut, self.config | {"draft_vocab_size": len(kept)}
        else:
            assert target is not None
            self.output = target.output_rows(kept)
        self.draft(kept)

    def draft(self, tokens: Tensor | None) -> None:
        """Set d2t and t2d for these tokens of the target, [N]; None: all, without either."""
        for name, value in zip(("d2t", "t2d"), mapping_of(tokens, self.vocab_size), strict=True):
            self.register_buffer(name, value, persistent=self.lm_head is not None)

    def fill(self, tensors: Tensors) -> None:
        super().fill(tensors)
        check_mapping(self.d2t, self.t2d, self.vocab_size)


def mapping_of(tokens: Tensor | None, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    """d2t and t2d for these tokens of the target, [Vd] ascending; None twice for all tokens."""
    if tokens is None or len(tokens) == vocab_size:
        return None, None
    d2t = tokens - torch.arange(len(tokens), device=tokens.device)
    t2d = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device)
    return d2t, t2d.index_fill(0, tokens, True)


def check_mapping(d2t: Tensor | None, t2d: Tensor | None, vocab_size: int) -> None:
    """Raises ValueError unless d2t and t2d name the same tokens of the target, each once."""
    if d2t is None or t2d is None:
        return
    for name, tensor, dtype in (("d2t", d2t, torch.int64), ("t2d", t2d, torch.bool)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} is of {tensor.dtype}, must be {dtype}")
    tokens = d2t + torch.arange(len(d2t))
    if len(outside := tokens[(tokens < 0) | (tokens >= vocab_size)]):
        raise ValueError(
            f"d2t leads to token {int(outside[0])}, outside the vocabulary of {vocab_size}"
        )
    times = tokens.bincount(minlength=vocab_size)
    if len(twice := (times > 1).nonzero()):
        raise ValueError(f"d2t leads to token {int(twice[0])} twice")
    if len(other := ((times > 0) != t2d).nonzero()):
        raise ValueError(
            f"t2d does not mark the tokens that d2t leads to: they differ at token {int(other[0])}"
        )
