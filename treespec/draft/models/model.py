"""A smaller language model as the drafter.

Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318).
"""

import logging
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from treespec.draft.models.branch import Branch
from treespec.draft.models.other_vocabulary import OtherVocabulary
from treespec.draft.models.shared_vocabulary import shared_vocabulary
from treespec.draft.proposer import PREFILL_AT, Frontier, Proposer
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.masks import together
from treespec.model.target import Target

log = logging.getLogger(__name__)


@final
class ModelProposer(Proposer):
    """Drafts with a model that has the target's tokens; one text at first.

    `begin` runs the model over the observed tokens that its cache lacks, and over the root. The
    root stays in the cache, as it is the next token to be observed. Drafted levels are written
    behind it and forgotten.
    """

    per_text = ("known", "cache")

    def __init__(self, model: Target, target: Target) -> None:
        self.model, self.target, self.vocab_size = model, target, target.vocab_size
        self.cache = model.new_cache()
        nothing = torch.empty(0, dtype=torch.int64, device=model.output_device)
        self.known = [nothing]  # [n] all tokens, by text
        self.branch: Branch | None = None

    @property
    def models(self) -> list[nn.Module]:
        return [self.model.model]

    @property
    def identity(self) -> object:
        return [self.model.config.to_dict(), str(self.model.dtype)]

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.known]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        fresh = [new[:-1].to(self.model.output_device) for new in tokens]
        self.known = [torch.cat(both) for both in zip(self.known, fresh, strict=True)]
        if max(map(len, fresh)) > PREFILL_AT:
            self._run(self.known)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.known = [tokens[:length] for tokens, length in zip(self.known, lengths, strict=True)]
        self.cache.rewind(
            [min(done, length) for done, length in zip(self.cache.lengths, lengths, strict=True)]
        )

    def new(self) -> "ModelProposer":
        return ModelProposer(self.model, self.target)

    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        self.rewind(self.lengths)  # drops an earlier root that was not observed afterwards
        roots = roots.to(self.model.output_device)
        texts = zip(self.known, roots.split(1), strict=True)
        hidden = self._run([torch.cat(text) for text in texts])
        logits = self._fitted(self.model.output_logits(hidden))
        self.branch = Branch(self.model, self.cache, self.cache.lengths)
        return list(logits.split(1))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        assert self.branch
        last = self.model.vocab_size - 1  # the target's embedding may be padded further
        inside = [f and Frontier(f.tokens.clamp_max(last), f.parent_rows) for f in frontiers]
        return [self._fitted(rows) for rows in self.branch.extend(inside)]

    @torch.no_grad()
    def _run(self, texts: Sequence[Tensor]) -> Tensor:
        """Bring texts into the cache; [B, H] hidden states at their ends.

        Each text is at least one token longer than the cache has it.
        """
        waiting = [tokens[done:] for tokens, done in zip(texts, self.cache.lengths, strict=True)]
        counts = [len(tokens) for tokens in waiting]
        tokens = together(waiting).clamp_max(self.model.vocab_size - 1)
        hidden = self.model.prefill(self.cache, tokens, counts=counts)
        return torch.stack([row[count - 1] for row, count in zip(hidden, counts, strict=True)])

    def _fitted(self, logits: Tensor) -> Tensor:
        """[F, V] logits over the target's vocabulary: cut, or filled with -inf."""
        return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)


def draft_model(path: str, target: Target) -> ModelProposer | OtherVocabulary:
    """`--drafter model:PATH`, in the target's dtype on its output device.

    A model of another vocabulary drafts what it shares with the target's, whose share is logged.
    Raises InputError if it does not fit.
    """
    model = loaded_model(path, target)
    difference = tokens_differ(model, target)
    if difference is None:
        return ModelProposer(model, target)
    if model.tokenizer is None or target.tokenizer is None:
        raise InputError(
            f"--drafter model:{path} has other tokens than the target ({difference}): take a model "
            "of its family"
        )
    sizes = target.vocab_size, model.vocab_size
    try:
        words = shared_vocabulary(target.tokenizer, model.tokenizer, *sizes)
    except InputError as error:
        raise InputError(
            f"--drafter model:{path} cannot draft for this target: {error}; take another model"
        ) from None
    log.warning(
        "draft model %s has another vocabulary: it drafts the %d tokens that both have, %.0f %% of "
        "the target's",
        path,
        len(words.target),
        100 * words.share,
    )
    return OtherVocabulary(model, target, words)


def loaded_model(path: str, target: Target) -> Target:
    """A draft model beside its target. Raises InputError where it cannot be loaded."""
    place = target.output_device
    try:
        return Target.load(
            path,
            dtype=target.dtype,
            device_map=None if place.type == "cpu" else {"": place},
            trust_remote_code=target.trust_remote_code,
        )
    except InputError as error:
        raise InputError(
            f"--drafter model:{path}: {str(error).replace('the target', 'the draft model')}"
        ) from error


def tokens_differ(model: Target, target: Target) -> str | None:
    """A difference between two models' numbering of tokens, or None if they agree.

    A number that only one of them names is padding of the other's embedding, and no difference.
    """
    if model.tokenizer is None or target.tokenizer is None:
        same = model.vocab_size == target.vocab_size and model.tokenizer is target.tokenizer
        sizes = f"{model.vocab_size} and {target.vocab_size}"
        return None if same else f"{sizes}, without a tokenizer to compare"
    theirs = {number: token for token, number in model.tokenizer.get_vocab().items()}
    ours = {number: token for token, number in target.tokenizer.get_vocab().items()}
    for number in sorted(theirs.keys() & ours.keys()):
        if theirs[number] != ours[number]:
            return f"token {number} is {theirs[number]!r}, the target's {ours[number]!r}"
    return None
