"""A smaller language model as the drafter (`--drafter model:PATH`), or several of them.

Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318).
"""

import logging
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from treespec.draft.drafter import PREFILL_AT, Frontier, Proposer
from treespec.draft.drafters import DrafterSpec
from treespec.draft.models.branch import Branch
from treespec.draft.models.other_vocabulary import (
    SharedVocabulary,
    shared_vocabulary,
    start_of,
    tokens_differ,
)
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.masks import together
from treespec.model.target import Target

log = logging.getLogger(__name__)


class ModelProposer(Proposer):
    """Drafts with a model that has the target's tokens; one sequence at first.

    `begin` runs the model over the observed tokens that its cache lacks, and over the root. The
    root stays in the cache, as it is the next token to be observed. Drafted levels are written
    after it and forgotten.

    known: [n] the draft model's tokens, by sequence.
    """

    per_text: tuple[str, ...] = ("known", "cache")
    branch: Branch

    def __init__(self, model: Target, target: Target) -> None:
        self.model, self.target, self.vocab_size = model, target, target.vocab_size
        self.cache = model.new_cache()
        self.known = [torch.empty(0, dtype=torch.int64, device=model.output_device)]

    @property
    def name(self) -> str:
        return "model"

    @property
    def models(self) -> list[nn.Module]:
        return [self.model.model]

    @property
    def identity(self) -> object:
        return [self.model.config.to_dict(), str(self.model.dtype)]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        self.known = self.continued([new[:-1] for new in tokens])
        if max(map(len, tokens)) - 1 > PREFILL_AT:
            self._run(self.known)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.known = [tokens[:length] for tokens, length in zip(self.known, lengths, strict=True)]
        self.cut()

    def cut(self) -> None:
        """Cut the cache to what is known."""
        lengths = zip(self.cache.lengths, self.known, strict=True)
        self.cache.rewind([min(length, len(known)) for length, known in lengths])

    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        self.cut()  # drops an earlier root that was not observed afterwards
        hidden = self._run(self.continued(roots.split(1)))
        logits = self.fitted(self.model.output_logits(hidden))
        self.branch = Branch(self.model, self.cache, self.cache.lengths)
        return list(logits.split(1))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        own = [f and Frontier(self.drafted(f.tokens), f.parent_rows) for f in frontiers]
        return [self.fitted(rows) for rows in self.branch.extend(own)]

    def continued(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """What is known of each sequence, and the draft model's tokens for the target's next ones [n]."""
        pairs = zip(self.known, tokens, strict=True)
        return [torch.cat([known, new.to(known.device)]) for known, new in pairs]

    def drafted(self, tokens: Tensor) -> Tensor:
        """The draft model's tokens for draft tokens [F]: the target's embedding may be padded further."""
        return tokens.clamp_max(self.model.vocab_size - 1)

    def fitted(self, logits: Tensor) -> Tensor:
        """[F, N] the model's logits [F, V] over the draft tokens: cut, or filled with -inf."""
        return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)

    @torch.no_grad()
    def _run(self, sequences: Sequence[Tensor]) -> Tensor:
        """Bring sequences into the cache; [B, H] hidden states at their ends.

        Each is at least one token longer than the cache has it.
        """
        pairs = zip(sequences, self.cache.lengths, strict=True)
        waiting = [tokens[done:] for tokens, done in pairs]
        counts = [len(tokens) for tokens in waiting]
        tokens = together(waiting).clamp_max(self.model.vocab_size - 1)
        hidden = self.model.prefill(self.cache, tokens, counts=counts)
        return hidden[torch.arange(len(counts)), torch.tensor(counts) - 1]


@final
class OtherVocabulary(ModelProposer):
    """Drafts the tokens that a model of another tokenizer shares with the target.

    Timor et al. 2025 (2502.05202), token-level intersection. The model's distribution is restricted to
    these tokens, and renormalised, before anything is drawn. So it is an ordinary draft distribution
    over a part of the target's vocabulary, and every verifier and tree stays lossless.

    The draft model reads the target's text token by token: a shared token as its own, any other one as
    the tokens that spell its bytes. Three tokens, of which the draft model lacks the second:

        target    the     ·unhappiness       ·of         ends  2 5 6: draft tokens up to each
        draft     <bos>  the  ·un happi ness  ·of

    So its cache stays valid while the text grows.

    known: also the start that the model's tokenizer gives every text. ends: how many of them there
    are up to each observed token of the target.
    """

    per_text = ("known", "ends", "cache")

    def __init__(self, model: Target, target: Target, words: SharedVocabulary) -> None:
        super().__init__(model, target)
        self.words = words
        self.shared = words.target.to(target.output_device)
        self.own = words.draft.to(model.output_device)
        start = start_of(model.tokenizer)
        self.skipped = frozenset(start_of(target.tokenizer) if start else ())  # as a first token
        self.known: list[Tensor] = [self.known[0].new_tensor(start)]
        self.start, self.ends = len(start), list[list[int]]([[]])

    @property
    def name(self) -> str:
        return "model of another vocabulary"

    @property
    def vocabulary(self) -> Tensor | None:
        return self.shared

    @property
    def identity(self) -> object:
        return [super().identity, len(self.shared)]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        ends = []
        for row, (known, new) in enumerate(zip(self.known, tokens, strict=True)):
            sizes = map(len, self.spelled(row, new[:-1]))
            ends.append(self.ends[row] + [*accumulate(sizes, initial=len(known))][1:])
        super().observe(features, tokens)
        self.ends = ends

    def continued(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        spelled = [self.spelled(row, new) for row, new in enumerate(tokens)]
        new = [self.known[0].new_tensor([*chain.from_iterable(row)]) for row in spelled]
        return super().continued(new)

    def spelled(self, row: int, tokens: Tensor) -> list[tuple[int, ...]]:
        """The draft tokens of each of a sequence's next tokens [n]."""
        numbers = tokens.tolist()
        spelled = [self.words.spelled(number) for number in numbers]
        if numbers and not self.ends[row] and numbers[0] in self.skipped:
            spelled[0] = ()
        return spelled

    def rewind(self, lengths: Sequence[int]) -> None:
        self.ends = [ends[:length] for ends, length in zip(self.ends, lengths, strict=True)]
        super().rewind([ends[-1] if ends else self.start for ends in self.ends])

    def cut(self) -> None:
        super().cut()
        # `begin` reads at least one token, and the first root may be one that only the target has.
        lengths = zip(self.cache.lengths, self.ends, strict=True)
        self.cache.rewind([length if ends else 0 for length, ends in lengths])

    def drafted(self, tokens: Tensor) -> Tensor:
        return self.own[tokens]

    def fitted(self, logits: Tensor) -> Tensor:
        return logits.index_select(-1, self.own)


@final
class SeveralModels(Proposer):
    """Several draft models at once (SpecInfer, Miao et al. 2024, 2305.09781, section 3).

    Their draws merge into one tree. The draws at a node take turns: the first comes from the first
    model, the second from the second, and so on round. Every model continues below all of them. Sampled
    draws keep the distribution they came from, and `rrs` takes one per draw; the logits are [F, M, V], of
    M models. Without sampling, the children are the union of each model's top tokens:

        model 1   a .5  b .3  c .2
        model 2   b .6  a .3  d .1     four draws by turns: a (1), b (2), then c (1), d (2)
    """

    q_per_draw = True

    def __init__(self, proposers: Sequence[ModelProposer]) -> None:
        self.proposers, self.vocab_size = list(proposers), proposers[0].vocab_size

    @property
    def models(self) -> list[nn.Module]:
        return [model for proposer in self.proposers for model in proposer.models]

    @property
    def identity(self) -> object:
        return [proposer.identity for proposer in self.proposers]

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        return list(stacked([proposer.begin(roots, cache) for proposer in self.proposers]))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        return stacked([proposer.extend(frontiers) for proposer in self.proposers])

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for proposer in self.proposers:
            proposer.observe(features, tokens)

    def rewind(self, lengths: Sequence[int]) -> None:
        for proposer in self.proposers:
            proposer.rewind(lengths)

    def new(self) -> "SeveralModels":
        return SeveralModels([proposer.new() for proposer in self.proposers])

    def join(self, others: Sequence["SeveralModels"]) -> None:
        for own, *theirs in zip(
            self.proposers, *(other.proposers for other in others), strict=True
        ):
            own.join(theirs)

    def select(self, rows: Sequence[int]) -> None:
        for proposer in self.proposers:
            proposer.select(rows)


def stacked(logits: Sequence[Sequence[Any]]) -> list[Tensor]:
    """Each model's [F, V] logits of each sequence -> [F, M, V] for each sequence."""
    return [torch.stack(rows, dim=1) for rows in zip(*logits, strict=True)]


def load_models(spec: DrafterSpec, target: Target) -> Proposer:
    """Draft models by directory or hub id, in the target's dtype. Raises InputError."""
    models = [draft_model(name, target) for name in spec.models]
    if len(models) == 1:
        return models[0]
    if any(model.vocabulary is not None for model in models):
        raise InputError(
            f"--drafter {spec.own}: several draft models must have the target's tokens; a model of "
            "another vocabulary drafts alone"
        )
    return SeveralModels(models)


def draft_model(path: str, target: Target) -> ModelProposer:
    """A draft model on the target's device. Raises InputError if it does not fit."""
    place = target.output_device
    how: dict[str, Any] = {"dtype": target.dtype, "trust_remote_code": target.trust_remote_code}
    try:
        model = Target.load(path, device_map=None if place.type == "cpu" else {"": place}, **how)
    except InputError as error:
        said = str(error).replace("the target", "the draft model")
        raise InputError(f"--drafter model:{path}: {said}") from error
    both = target.tokenizer, model.tokenizer, target.vocab_size, model.vocab_size
    difference = tokens_differ(*both)
    if difference is None:
        return ModelProposer(model, target)
    if model.tokenizer is None or target.tokenizer is None:
        raise InputError(
            f"--drafter model:{path} has other tokens than the target ({difference}): take a model "
            "of its family"
        )
    try:
        words = shared_vocabulary(*both)
    except InputError as error:
        raise InputError(
            f"--drafter model:{path} cannot draft for this target: {error}; take another model"
        ) from None
    log.warning(
        f"draft model {path} has another vocabulary: it drafts the {len(words.target)} tokens that "
        f"both have, {words.share:.0%} of the target's"
    )
    return OtherVocabulary(model, target, words)
