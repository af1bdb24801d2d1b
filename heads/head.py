"""The interface of draft heads: what training and drafting may call on a head of any kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from treespec.files.atomic import Fields as Config

Tensors = dict[str, Tensor]  # by name, as a checkpoint holds them
Stored = tuple[Config, Tensors]  # config.json and the tensors of a head's directory
Embed = Callable[[Tensor], Tensor]  # [...] tokens -> [..., H] embeddings

EMBEDDING_NAME = "embed_tokens.weight"
PADDING_TOKENS = 1024  # vocabulary sizes that differ by more belong to different vocabularies


class TargetOutputPath(Protocol):
    """The part of the target that turns hidden states into logits."""

    def compute_output_logits(self, hidden: Tensor, output: nn.Module | None = None) -> Tensor:
        """[..., H] hidden states -> [..., V] logits; [..., N] with `output` from `copy_output_rows`."""
        ...

    def copy_output_rows(self, tokens: Tensor) -> nn.Linear:
        """Copy only the rows of the output embedding for the tokens [N]: a layer H -> N."""
        ...


class TargetFacts(Protocol):
    """The facts about a target that a new head is built from.

    Attributes:
        config: the target's text config.
        feature_width: width of the hidden states that enter the target's output embedding. In some models
            (OPT) it differs from `hidden_size`.
        vocab_size: V.
        layers: the number of decoder layers.
        embed_scale: the factor on the target's embeddings; 1 for most models.
    """

    config: PretrainedConfig
    feature_width: int
    vocab_size: int
    layers: int

    @property
    def embed_scale(self) -> float: ...


class Head(nn.Module, ABC):
    """A draft head for one target. Its shapes follow from its config.

    Attributes:
        kind: its name in `heads.registry`, and the value of `--drafter` and `--head`.
        known_as: its name in messages, such as "an EAGLE-3 head".
        optional: names of tensors that a checkpoint may lack, because the target has them.
        config: the content of its config.json.
        aux_layers: the target layers whose inputs are the head's features; (): the feature is the hidden
            state after the final norm.
        max_depth: the number of levels that it can draft; None: any number.
        cached_layers: the number of its layers with keys and values.
        vocab_size: V of its target.
        hidden_size: H, the width of the states that it computes.
        feature_size: F, the width of the target's features, all aux layers together.
        lm_head: the head's output layer; None: it uses the target's.
        output: pruned copy of the target's lm_head, for a head without an output layer that drafts
            few tokens.
        d2t, t2d: the draft vocabulary, saved with `lm_head` by their published names. d2t [Vd] int64:
            draft token i is the target's i + d2t[i]. t2d [V] bool marks these tokens. None: it
            drafts all tokens.
        embed_tokens: its embedding; None if the checkpoint has none and the target's is not shared yet.
    """

    kind: str
    known_as: ClassVar[str]
    optional: ClassVar[frozenset[str]] = frozenset()
    aux_layers: tuple[int, ...] = ()
    max_depth: int | None = None
    cached_layers: int = 0
    hidden_size: int
    feature_size: int
    lm_head: nn.Linear | None
    output: nn.Module | None
    embed_tokens: nn.Module | None
    d2t: Tensor | None
    t2d: Tensor | None
    _drafted_tokens: Tensor | None = None  # `vocabulary`, computed from `_numbered_d2t`
    _numbered_d2t: Tensor | None = None

    def __init__(self, config: Config, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.lm_head = self.output = self.embed_tokens = None
        self.draft(None)

    @property
    def vocabulary(self) -> Tensor | None:
        """[N] int64 ascending: the target's token for each draft token; None: all V, in order."""
        d2t = self.d2t
        if d2t is None:
            return None
        if self._numbered_d2t is not d2t:
            with torch.inference_mode(False):  # training may need it later
                self._drafted_tokens = d2t + torch.arange(len(d2t), device=d2t.device)
            self._numbered_d2t = d2t
        return self._drafted_tokens

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its input features. Its embedding may have the target's dtype instead."""
        for name, part in self.named_modules():
            weight = getattr(part, "weight", None)  # a packed layer keeps its original weight there
            if isinstance(weight, Tensor) and f"{name}.weight" != EMBEDDING_NAME:
                return weight.dtype
        raise AssertionError("a head has weights")

    @property
    def lacks_embedding(self) -> bool:
        """Whether it needs an embedding and has none yet: `share_embedding` sets the target's."""
        return False

    @property
    def output_layers(self) -> list[nn.Linear]:
        """The output layers that the head has itself, H -> N; [] if it uses the target's."""
        if self.lm_head is None:
            return []
        return [self.lm_head]

    @property
    def token_layers(self) -> list[nn.Linear]:
        """The layers with a row for each draft token, by default the output layers: `restrict` keeps some rows."""
        return self.output_layers

    @classmethod
    @abstractmethod
    def build_config(cls, target: TargetFacts, **fields: Any) -> Config:
        """Build the config.json of a new head for a target. fields: values that replace the defaults."""

    @abstractmethod
    def forward(
        self, tokens: Tensor, features: Tensor, counts: Tensor, steps: int, embed: Embed
    ) -> list[Tensor]:
        """Draft from every position of the sequences at once, for training and for measuring agreement.

        Row t reads the feature of position t and the token after it. It drafts the token two positions
        on, because the token after t is known: the target drew it from that same feature.
        Five tokens; drafts of d and e are wanted:

            position  0  1  2  3  4
            token     a  b  c  d  e
            feature   f0 f1 f2              of positions 0 to R - 1; R = T - 2 = 3 rows
            row t     0  1  2
            reads     b  c  d               beside f0, f1 and f2
            counts    0  1  1
            step 0    c  d  e               row t of step s is for token t + s + 2,
            step 1    d  e                  and is wanted where counts[t + s]
            step 2    e

        During decoding, a head reads the same pairs as they become known. Here a to e are the prompt: e
        is the root of the first tree, and r is the token that the target draws after it, from f4.

            first     f0,b  f1,c  f2,d  f3,e    the last one drafts the token after e
            then      f4,r                      in the next cycle: drafts the token after r

        Args:
            tokens: [B, T] int64.
            features: [B, R, F] the target's features at the first R = T - 2 positions.
            counts: [B, R] bool: whether a draft of token t + 2 is wanted.
            steps: the number of draft steps; at most `max_depth` are computed. Steps from R on have no rows.
            embed: the target's embedding.

        Returns:
            For each step the states [M, H] of its wanted rows, the input of `project`.
        """

    @abstractmethod
    def project(self, states: Tensor, step: int, target: TargetOutputPath) -> Tensor:
        """Turn states of `forward` into draft logits, by the output layer of a draft step.

        Row t of step s is for token t + s + 2. So compare `project(states, s)[t]` with the target's
        logits at position t + s + 1. With the five tokens of `forward`:

            states of step 1     row 0   row 1          drafts of d and e
            target's logits at   c       d              the logits from which d and e were drawn

        Args:
            states: [..., H] the states of one draft step.
            step: the number of the step, from 0. Medusa's and Hydra's heads have an output layer for each step.
            target: the output path of the target, for a head without an output layer.

        Returns:
            [..., N] logits over the draft vocabulary.
        """

    def find_retrieved(self, states: Tensor, count: int) -> Tensor | None:
        """Find which of the most likely tokens a head that selects candidates selects.

        Args:
            states: [..., H] of a draft step.
            count: the number k of tokens, the most likely ones by logits of all draft tokens.

        Returns:
            [..., k] bool, most likely first; None for a head that computes the logits of all its tokens.
        """
        return None

    def check_target(self, layers: int, vocab_size: int, hidden_size: int, last: int) -> None:
        """Check that the head fits a target; set default aux layers and adapt the vocabulary's padding.

        Args:
            layers: L, the target's number of layers. Aux layer L is the output of the last layer.
            vocab_size: the target's V.
            hidden_size: the target's H.
            last: width of the target's last hidden state, after the final norm.

        Raises:
            ValueError: if the head is for another number of layers, width or vocabulary.
        """
        self.set_default_aux_layers(layers)
        beyond = [k for k in self.aux_layers if not 0 <= k <= layers]
        if beyond:
            raise ValueError(
                f"it reads layer {beyond[0]}, the target has {layers}: it is for another target"
            )
        if self.vocab_size != vocab_size and is_padding(self.vocab_size, vocab_size):
            self.fit_vocabulary(vocab_size)
        width = last
        if self.aux_layers:
            width = len(self.aux_layers) * hidden_size
        if self.feature_size != width:
            raise ValueError(
                f"it is for features of width {self.feature_size}, the target's are {width}"
            )
        if self.vocab_size != vocab_size:
            raise ValueError(
                f"it is for a vocabulary of {self.vocab_size}, the target's are {vocab_size}"
            )

    def fit_vocabulary(self, size: int) -> None:
        """Set the vocabulary size to the target's `size`, if the two sizes differ by padding.

        A head that cannot change its size stays as it is, and `check_target` refuses it.
        """

    def set_default_aux_layers(self, layers: int) -> None:
        """If the config names no aux layers, take those published for `layers` layers."""

    def share_embedding(self, weight: nn.Parameter | nn.Module) -> None:
        """Use the target's embedding [V, E], if the head has none or an equal copy of it.

        weight: the embedding's weight, or its module if the weight is no plain matrix (quantised).
        """

    def restrict(self, tokens: Tensor, target: TargetOutputPath | None = None) -> None:
        """Restrict drafts to the target's `tokens`, [N] int64 ascending.

        It keeps only their rows of the output layers, and sets d2t and t2d.
        """
        drafted = self.vocabulary
        rows = kept_tokens = tokens
        if drafted is not None:
            rows = torch.isin(drafted, tokens).nonzero().squeeze(1)
            kept_tokens = drafted[rows]
        for layer in self.token_layers:
            layer.out_features = len(rows)
            for name, value in list(layer.named_parameters()):
                part = value.detach()[rows.to(value.device)]
                setattr(layer, name, nn.Parameter(part, value.requires_grad))
        if self.lm_head is not None:
            self.config = self.config | {"draft_vocab_size": len(kept_tokens)}
        elif not self.output_layers:
            assert target is not None
            self.output = target.copy_output_rows(kept_tokens)
        self.draft(kept_tokens)

    def draft(self, tokens: Tensor | None) -> None:
        """Set d2t and t2d for these tokens of the target, [N]. None drafts all tokens: both are None."""
        d2t: Tensor | None = None
        t2d: Tensor | None = None
        if tokens is not None and len(tokens) < self.vocab_size:
            d2t = tokens - torch.arange(len(tokens), device=tokens.device)
            t2d = torch.zeros(self.vocab_size, dtype=torch.bool, device=tokens.device)
            t2d[tokens] = True
        saved = self.lm_head is not None
        self.register_buffer("d2t", d2t, persistent=saved)
        self.register_buffer("t2d", t2d, persistent=saved)

    def fill(self, tensors: Tensors) -> None:
        """Load a checkpoint's tensors, whose names and shapes were checked before.

        Raises ValueError if d2t and t2d contradict each other.
        """
        if EMBEDDING_NAME in self.optional - tensors.keys():
            self.embed_tokens = None
        self.load_state_dict(tensors, assign=True)
        if self.d2t is not None and self.t2d is not None:
            check_mapping(self.d2t, self.t2d)


def is_padding(size: int, other: int) -> bool:
    """Whether two vocabulary sizes differ by padding: at most by 1024 tokens and by a 32nd.

    Projects pad the embedding to a multiple of 64 to 512. Qwen 3's has 151,936 rows, 267 of them padding.
    """
    larger = max(size, other)
    return larger - min(size, other) <= min(PADDING_TOKENS, larger // 32)


def check_mapping(d2t: Tensor, t2d: Tensor) -> None:
    """Raises ValueError unless d2t and t2d name the same tokens of the target, each once."""
    if d2t.dtype != torch.int64:
        raise ValueError(f"d2t is of {d2t.dtype}, must be {torch.int64}")
    if t2d.dtype != torch.bool:
        raise ValueError(f"t2d is of {t2d.dtype}, must be {torch.bool}")
    tokens = d2t + torch.arange(len(d2t), device="cpu")
    check_marks(tokens.sort().values, t2d)


def check_marks(tokens: Tensor, t2d: Tensor) -> None:
    """Raises ValueError unless t2d [V] marks these tokens [Vd], ascending, and no other."""
    marked = t2d.nonzero().flatten()
    if not torch.equal(tokens, marked):
        differing = sorted(set(tokens.tolist()) ^ set(marked.tolist()))
        raise ValueError(
            f"d2t does not lead once to each token that t2d marks: they differ at {differing[:5]}"
        )
