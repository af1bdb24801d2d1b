"""A smaller language model as the drafter (`--drafter model:PATH`).

Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318).
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from treespec.draft.drafter import PREFILL_AT, Frontier, Frontiers
from treespec.draft.models.branch import BranchProposer
from treespec.draft.models.other_vocabulary import (
    SharedVocabulary,
    build_shared_vocabulary,
    find_start_tokens,
    find_token_difference,
)
from treespec.draft.spec import DrafterSpec
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.masks import pad_and_stack
from treespec.model.target import Target

log = logging.getLogger(__name__)


class ModelProposer(BranchProposer):
    """Drafts with a model that has the target's tokens; one sequence at first.

    `begin` runs the model over the observed tokens that its cache lacks, and over the root. The root stays in the
    cache, because it is the next token to be observed. Drafted levels are written after it and then dropped.

    Attributes:
        states: [n] int64 the observed tokens of each sequence, on the host.
        cache: the draft model's.
    """

    states: list[Tensor]

    def __init__(self, model: Target, target: Target) -> None:
        self.model = model
        self.target = target
        self.vocab_size = target.vocab_size
        self.cache = model.build_cache()
        self.states = [torch.empty(0, dtype=torch.int64, device="cpu")]

    def new(self) -> Self:
        return type(self)(self.model, self.target)

    @property
    def row_holders(self) -> list[TreeCache]:
        return [self.cache]

    @property
    def models(self) -> list[nn.Module]:
        return [self.model.model]

    @property
    def identity(self) -> object:
        return [self.model.config.to_dict(), str(self.model.dtype)]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.states = self.list_new_tokens([new_tokens[:-1] for new_tokens in tokens])
        if max(map(len, tokens)) - 1 > PREFILL_AT:
            self._run(self.states)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.states = [tokens[:n] for tokens, n in zip(self.states, lengths, strict=True)]
        model_lengths = [len(self.to_model_tokens(tokens)) for tokens in self.states]
        self.cache.rewind(list(map(min, self.cache.lengths, model_lengths)))

    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        # An earlier root that was not observed afterwards leaves the cache.
        self.rewind(list(map(len, self.states)))
        hidden = self._run(self.list_new_tokens(roots.split(1)))
        self.follow(self.cache)
        return list(self.fit_logits(self.model.compute_output_logits(hidden)).split(1))

    def extend(self, frontiers: Frontiers) -> list[Tensor]:
        in_model_tokens: list[Frontier | None] = []
        for frontier in frontiers:
            if frontier:
                frontier = Frontier(
                    self.to_model_draft_tokens(frontier.tokens), frontier.parent_rows
                )
            in_model_tokens.append(frontier)
        return list(map(self.fit_logits, super().extend(in_model_tokens)))

    def list_new_tokens(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Returns the observed tokens of each sequence, followed by new ones. tokens: [n] of each sequence."""
        return [torch.cat(pair) for pair in zip(self.states, tokens, strict=True)]

    def to_model_tokens(self, tokens: Tensor) -> Tensor:
        """Converts a sequence of the target's tokens [n], from its first token on, to the draft model's."""
        return self.to_model_draft_tokens(tokens)

    def to_model_draft_tokens(self, tokens: Tensor) -> Tensor:
        """Converts draft tokens [F] to the draft model's: the target's embedding may have more padding rows."""
        return tokens.clamp_max(self.model.vocab_size - 1)

    def fit_logits(self, logits: Tensor) -> Tensor:
        """Cuts the model's logits [F, V] to the draft tokens [F, N], or fills them with -inf."""
        return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)

    @torch.no_grad()
    def _run(self, sequences: Sequence[Tensor]) -> Tensor:
        """Runs the model over the tokens that its cache lacks; returns [B, H] hidden states of the last ones."""
        token_rows = list(map(self.to_model_tokens, sequences))
        # A root that the draft model has no token for adds nothing: the token before it runs again.
        rerun_from = [len(tokens) - 1 for tokens in token_rows]
        self.cache.rewind(list(map(min, self.cache.lengths, rerun_from)))
        waiting = [row[n:] for row, n in zip(token_rows, self.cache.lengths, strict=True)]
        counts = list(map(len, waiting))
        hidden = self.model.prefill(self.cache, pad_and_stack(waiting), counts=counts)
        return torch.stack([row[n - 1] for row, n in zip(hidden, counts, strict=True)])


@final
class OtherVocabulary(ModelProposer):
    """Drafts the tokens that a model of another tokenizer shares with the target.

    Timor et al. 2025 (2502.05202), token-level intersection. The model's distribution is restricted to
    these tokens, and renormalised, before anything is drawn. So it is an ordinary draft distribution
    over a part of the target's vocabulary, and every verifier and tree stays lossless.

    The draft model reads the start tokens of its tokenizer, then the target's sequence token by token. A shared
    token has an equivalent; any other one is replaced by the tokens that spell its bytes. Three tokens; the draft
    model lacks the second one:

        target    the     ·unhappiness       ·of
        draft     <bos>  the  ·un happi ness  ·of

    So its cache stays valid while the sequence grows.
    """

    def __init__(self, model: Target, target: Target, words: SharedVocabulary) -> None:
        super().__init__(model, target)
        self.words = replace(
            words,
            target=words.target.to(target.output_device),
            draft=words.draft.to(model.output_device),
        )
        self.start = find_start_tokens(model.tokenizer)
        self.skipped = frozenset[int]()  # of the target, as a first token
        if self.start:
            self.skipped = frozenset(find_start_tokens(target.tokenizer))

    def new(self) -> Self:
        return type(self)(self.model, self.target, self.words)

    @property
    def name(self) -> str:
        return "model of another vocabulary"

    @property
    def vocabulary(self) -> Tensor | None:
        return self.words.target

    @property
    def identity(self) -> object:
        return [super().identity, len(self.words.target)]

    def to_model_tokens(self, tokens: Tensor) -> Tensor:
        target_tokens = tokens.tolist()
        if target_tokens and target_tokens[0] in self.skipped:
            del target_tokens[0]
        model_tokens = list(self.start)
        for token in target_tokens:
            model_tokens += self.words.encode_bytes_of(token)
        return tokens.new_tensor(model_tokens)

    def to_model_draft_tokens(self, tokens: Tensor) -> Tensor:
        return self.words.draft[tokens]

    def fit_logits(self, logits: Tensor) -> Tensor:
        return logits.index_select(-1, self.words.draft)


def load_draft_model(spec: DrafterSpec, target: Target) -> ModelProposer:
    """A draft model by directory or hub id, in the target's dtype, on its device. Raises InputError."""
    place = target.output_device
    name = f"--drafter {spec.own}"
    options: dict[str, Any] = {"trust_remote_code": target.trust_remote_code}
    if place.type != "cpu":
        options["device_map"] = {"": place}
    try:
        model = Target.load(spec.place, dtype=target.dtype, **options)
    except InputError as error:
        said = str(error).replace("the target", "the draft model")
        raise InputError(f"{name}: {said}") from error
    difference = find_token_difference(
        target.tokenizer, model.tokenizer, target.vocab_size, model.vocab_size
    )
    if difference is None:
        return ModelProposer(model, target)
    try:
        if target.tokenizer is None or model.tokenizer is None:
            raise InputError(difference)
        words = build_shared_vocabulary(
            target.tokenizer, model.tokenizer, target.vocab_size, model.vocab_size
        )
    except InputError as error:
        raise InputError(
            f"{name} cannot draft for this target: {error}; take another model"
        ) from None
    log.warning(
        f"draft model {spec.place} has another vocabulary: it drafts the {len(words.target)} tokens that "
        f"both have, {words.share:.0%} of the target's"
    )
    return OtherVocabulary(model, target, words)
