"""A draft model of another vocabulary (Timor et al. 2025, 2502.05202, token-level intersection).

Its law is restricted to the tokens that it shares with the target, and renormalised, before anything
is drawn. So it is an ordinary draft law over a part of the target's vocabulary, as that of a head
with a draft vocabulary, and every verifier and tree stays lossless.

The draft model reads the target's text token by token: a shared token as its own, any other one as
the tokens that spell its bytes. A text of three tokens, of which the draft model lacks the second:

    target    the     ·unhappiness       ·of         ends  2 5 6: draft tokens up to each
    draft     <bos>  the  ·un happi ness  ·of

So what is in its cache stays valid while the text grows, unlike after tokenising the text anew.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from treespec.draft.models.branch import Branch
from treespec.draft.models.shared_vocabulary import SharedVocabulary
from treespec.draft.proposer import PREFILL_AT, Frontier, Proposer
from treespec.model.cache import TreeCache
from treespec.model.masks import together
from treespec.model.target import Target


@final
class OtherVocabulary(Proposer):
    """Drafts shared tokens with a model of another tokenizer; one text at first.

    known: [n] the draft tokens of each text, after the start that its tokenizer gives every text.
    ends: how many of them there are up to each observed token of the target.
    """

    per_text = ("known", "ends", "cache")

    def __init__(self, model: Target, target: Target, words: SharedVocabulary) -> None:
        self.model, self.target, self.words = model, target, words
        self.vocab_size = target.vocab_size
        place = model.output_device
        self.shared, self.own = words.target.to(target.output_device), words.draft.to(place)
        start, target_start = start_of(model.tokenizer), start_of(target.tokenizer)
        self.start = torch.tensor(start, dtype=torch.int64, device=place)
        self.skipped = frozenset(target_start if start else ())  # as a text's first token
        self.cache = model.new_cache()
        self.known: list[Tensor] = [self.start]
        self.ends: list[list[int]] = [[]]
        self.branch: Branch | None = None

    @property
    def vocabulary(self) -> Tensor | None:
        return self.shared

    @property
    def models(self) -> list[nn.Module]:
        return [self.model.model]

    @property
    def identity(self) -> object:
        return [self.model.config.to_dict(), str(self.model.dtype), len(self.shared)]

    @property
    def lengths(self) -> list[int]:
        return [len(ends) for ends in self.ends]

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, new in enumerate(tokens):
            fresh: list[int] = []
            before, ends = len(self.known[row]), self.ends[row]
            for token in new[:-1].tolist():
                fresh += self._spelled(token, first=not ends)
                ends.append(before + len(fresh))
            added = torch.tensor(fresh, dtype=torch.int64, device=self.start.device)
            self.known[row] = torch.cat([self.known[row], added])
        if max(map(len, tokens)) - 1 > PREFILL_AT:
            self._run(self.known)

    def rewind(self, lengths: Sequence[int]) -> None:
        self.ends = [ends[:length] for ends, length in zip(self.ends, lengths, strict=True)]
        start = len(self.start)
        self.known = [
            known[: ends[-1] if ends else start]
            for known, ends in zip(self.known, self.ends, strict=True)
        ]
        done = zip(self.cache.lengths, self.known, self.ends, strict=True)
        # `begin` reads at least one token, and the first root may be one that only the target has.
        self.cache.rewind([min(length, len(known)) if ends else 0 for length, known, ends in done])

    def new(self) -> "OtherVocabulary":
        return OtherVocabulary(self.model, self.target, self.words)

    def begin(self, roots: Tensor, cache: TreeCache | None = None) -> list[Tensor | None]:
        self.rewind(self.lengths)  # drops an earlier root that was not observed afterwards
        texts = []
        for known, ends, root in zip(self.known, self.ends, roots.tolist(), strict=True):
            spelled = self._spelled(root, first=not ends)
            texts.append(torch.cat([known, known.new_tensor(spelled)]))
        logits = self._shared(self.model.output_logits(self._run(texts)))
        self.branch = Branch(self.model, self.cache, self.cache.lengths)
        return list(logits.split(1))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        assert self.branch
        own = [f and Frontier(self.own[f.tokens], f.parent_rows) for f in frontiers]
        return [self._shared(rows) for rows in self.branch.extend(own)]

    def _spelled(self, token: int, first: bool) -> tuple[int, ...]:
        """The draft tokens of a target's. first: whether it is the text's first one."""
        return () if first and token in self.skipped else self.words.spelled(token)

    def _shared(self, logits: Tensor) -> Tensor:
        """[F, N] the logits of the shared tokens, of [F, V] of the draft model's."""
        return logits.index_select(-1, self.own)

    @torch.no_grad()
    def _run(self, texts: Sequence[Tensor]) -> Tensor:
        """Bring texts into the cache; [B, H] hidden states at their ends.

        Each text is at least one token longer than the cache has it.
        """
        waiting = [tokens[done:] for tokens, done in zip(texts, self.cache.lengths, strict=True)]
        counts = [len(tokens) for tokens in waiting]
        hidden = self.model.prefill(self.cache, together(waiting), counts=counts)
        return torch.stack([row[count - 1] for row, count in zip(hidden, counts, strict=True)])


def start_of(tokenizer: object) -> list[int]:
    """The special tokens that a tokenizer gives every text at its start."""
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        return []
    around, bare = encode("a"), encode("a", add_special_tokens=False)
    return list(around[: around.index(bare[0])]) if bare and bare[0] in around else []
