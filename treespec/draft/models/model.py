"""A smaller language model as the drafter, or several of them.

Leviathan et al. 2023 (2211.17192), Chen et al. 2023 (2302.01318).
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from treespec.draft.drafter import PREFILL_AT, Frontier, Proposer
from treespec.draft.models.branch import Branch
from treespec.model.cache import TreeCache
from treespec.model.masks import together
from treespec.model.target import Target


class ModelProposer(Proposer):
    """Drafts with a model that has the target's tokens; one sequence at first.

    `begin` runs the model over the observed tokens that its cache lacks, and over the root. The
    root stays in the cache, as it is the next token to be observed. Drafted levels are written
    behind it and forgotten.

    known: [n] the draft model's tokens, by sequence.
    """

    per_text: tuple[str, ...] = ("known", "cache")
    branch: Branch

    def __init__(self, model: Target, target: Target) -> None:
        self.model, self.target, self.vocab_size = model, target, target.vocab_size
        self.cache = model.new_cache()
        nothing = torch.empty(0, dtype=torch.int64, device=model.output_device)
        self.known = [nothing]

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
        fresh = self.translated([new[:-1] for new in tokens])
        self.known = [torch.cat(both) for both in zip(self.known, fresh, strict=True)]
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
        # Drop an earlier root that was not observed afterwards.
        self.cut()
        fresh = self.translated(list(roots.split(1)))
        hidden = self._run([torch.cat(text) for text in zip(self.known, fresh, strict=True)])
        logits = self.fitted(self.model.output_logits(hidden))
        self.branch = Branch(self.model, self.cache, self.cache.lengths)
        return list(logits.split(1))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        own = [f and Frontier(self.drafted(f.tokens), f.parent_rows) for f in frontiers]
        return [self.fitted(rows) for rows in self.branch.extend(own)]

    def translated(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """The draft model's tokens for the target's next ones, [n] by sequence."""
        return [new.to(self.model.output_device) for new in tokens]

    def drafted(self, tokens: Tensor) -> Tensor:
        """The draft model's tokens for draft tokens [F]: the target's embedding may be padded further."""
        return tokens.clamp_max(self.model.vocab_size - 1)

    def fitted(self, logits: Tensor) -> Tensor:
        """[F, N] the model's logits [F, V] over the draft tokens: cut, or filled with -inf."""
        return pad(logits, (0, self.vocab_size - logits.shape[-1]), value=-torch.inf)

    @torch.no_grad()
    def _run(self, texts: Sequence[Tensor]) -> Tensor:
        """Bring sequences into the cache; [B, H] hidden states at their ends.

        Each is at least one token longer than the cache has it.
        """
        waiting = [tokens[done:] for tokens, done in zip(texts, self.cache.lengths, strict=True)]
        counts = [len(tokens) for tokens in waiting]
        tokens = together(waiting).clamp_max(self.model.vocab_size - 1)
        hidden = self.model.prefill(self.cache, tokens, counts=counts)
        return torch.stack([row[count - 1] for row, count in zip(hidden, counts, strict=True)])


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
        begun = [proposer.begin(roots, cache) for proposer in self.proposers]
        return list(stacked([[logits for logits in own if logits is not None] for own in begun]))

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
        for i, proposer in enumerate(self.proposers):
            proposer.join([other.proposers[i] for other in others])

    def select(self, rows: Sequence[int]) -> None:
        for proposer in self.proposers:
            proposer.select(rows)


def stacked(logits: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Each model's [F, V] logits of each text -> [F, M, V] for each text."""
    return [torch.stack(rows, dim=1) for rows in zip(*logits, strict=True)]
