"""A smaller language model as the drafter (Leviathan et al. 2023, 2211.17192; Chen et al. 2023, 2302.01318)."""

import time
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from treespec.cache import TreeCache
from treespec.draft.branch import Branch
from treespec.draft.growth import Frontier
from treespec.errors import InputError
from treespec.packed import pack
from treespec.target import Target

MANY = 32  # tokens: more than a cycle brings


@final
class ModelProposer:
    """Drafts with a model that has the target's tokens; one text at first.

    Observed tokens wait until `begin` runs the model over them and the root. The root stays in its cache, being the
    first token to be observed next; drafted levels are written behind it and forgotten.
    """

    taps: tuple[int, ...] = ()
    vocabulary: Tensor | None = None

    def __init__(self, model: Target, target: Target) -> None:
        self.model, self.target, self.vocab_size = model, target, target.vocab_size
        self.forward_seconds = 0.0
        self.cache = model.new_cache()
        self.lengths = [0]
        self.waiting = [self._nothing()]  # of each text the tokens [n] behind those in the cache
        self.branch: Branch | None = None

    @property
    def identity(self) -> object:
        return [self.model.config.to_dict(), str(self.model.dtype)]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, new in enumerate(tokens):
            known = self.cache.lengths[row] - self.lengths[row]  # 1 for a root that begin ran
            self.lengths[row] += len(new) - 1
            fresh = new[max(known, 0) : -1].to(self.model.output_device)
            self.waiting[row] = torch.cat([self.waiting[row], fresh])
        if max(map(len, self.waiting)) > MANY:
            self._run()

    def rewind(self, lengths: Sequence[int]) -> None:
        keep = [max(0, length - done) for length, done in zip(lengths, self.cache.lengths, strict=True)]
        self.waiting = [tokens[:n] for tokens, n in zip(self.waiting, keep, strict=True)]
        self.lengths = [min(known, length) for known, length in zip(self.lengths, lengths, strict=True)]
        self.cache.rewind([min(done, length) for done, length in zip(self.cache.lengths, lengths, strict=True)])

    def new(self) -> "ModelProposer":
        return ModelProposer(self.model, self.target)

    def join(self, others: Sequence["ModelProposer"]) -> None:
        self.waiting += [tokens for other in others for tokens in other.waiting]
        self.lengths += [length for other in others for length in other.lengths]
        self.cache.join([other.cache for other in others])

    def select(self, rows: Sequence[int]) -> None:
        self.waiting = [self.waiting[row] for row in rows]
        self.lengths = [self.lengths[row] for row in rows]
        self.cache.select(rows)

    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        started = time.perf_counter()
        self.rewind(self.lengths)  # a root that was not observed is another's
        roots = roots.to(self.model.output_device)
        self.waiting = [torch.cat(known) for known in zip(self.waiting, roots.split(1), strict=True)]
        logits = self.model.output_logits(self._run())
        self.branch = Branch(self.model, self.cache, self.cache.lengths)
        self.forward_seconds += time.perf_counter() - started
        return list(self._fitted(logits).split(1))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        assert self.branch
        started = time.perf_counter()
        last = self.model.vocab_size - 1  # padding of the target's embedding that the model lacks
        inside = [f and Frontier(f.tokens.clamp_max(last), f.parent_rows) for f in frontiers]
        logits = [self._fitted(rows) for rows in self.branch.extend(inside)]
        self.forward_seconds += time.perf_counter() - started
        return logits

    @torch.no_grad()
    def _run(self) -> Tensor:
        """Commit what waits; [B, H] hidden states at the last token of each text that waited."""
        counts = [len(tokens) for tokens in self.waiting]
        tokens = pad_sequence(self.waiting, batch_first=True).clamp_max(self.model.vocab_size - 1)
        hidden = self.model.prefill(self.cache, tokens, counts=counts)
        self.waiting = [self._nothing() for _ in counts]
        return torch.stack([row[count - 1] for row, count in zip(hidden, counts, strict=True)])

    def _fitted(self, logits: Tensor) -> Tensor:
        """[F, V] logits over the target's vocabulary: padding of the model's own is cut, of the target's is -inf."""
        return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=torch.int64, device=self.model.output_device)


def draft_model(path: str, target: Target) -> ModelProposer:
    """`--drafter model:PATH`, in the target's dtype beside its output. Raises InputError for one that does not fit."""
    place = target.output_device
    try:
        model = Target.load(path, dtype=target.dtype, device_map=None if place.type == "cpu" else {"": place})
    except InputError as error:
        raise InputError(f"--drafter model:{path}: {error}") from error
    if difference := tokens_differ(model, target):
        raise InputError(
            f"--drafter model:{path} has other tokens than the target ({difference}): take a model of its family"
        )
    pack(model.model)
    return ModelProposer(model, target)


def tokens_differ(model: Target, target: Target) -> str | None:
    """Where two models do not name the same tokens by the same numbers; None where they do.

    A number that only one of them names is padding of the other's embedding: it may be there or not.
    """
    if model.tokenizer is None or target.tokenizer is None:
        same = model.vocab_size == target.vocab_size and model.tokenizer is target.tokenizer
        return None if same else f"{model.vocab_size} and {target.vocab_size}, without a tokenizer to compare"
    theirs, ours = ({i: token for token, i in one.tokenizer.get_vocab().items()} for one in (model, target))
    differ = [i for i in sorted(theirs.keys() & ours.keys()) if theirs[i] != ours[i]]
    return f"token {differ[0]} is {theirs[differ[0]]!r}, the target's {ours[differ[0]]!r}" if differ else None
