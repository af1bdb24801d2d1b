"""Drafts of another vocabulary as text (2502.05202, string-level exact match).

The draft model reads the text in its own tokens, goes on greedily, and its words become the target's
tokens. They have no draft law, so the children are given, one chain a cycle: meant for temperature 0,
lossless at any. It drafts tokens that the vocabularies do not share, too.
"""

import time
from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from treespec.cache import TreeCache
from treespec.draft.drafter import Drafter
from treespec.shaping.law import Law
from treespec.target import Target, TreeOutput
from treespec.text.prefix import common_prefix
from treespec.trees.chain import hung_below
from treespec.trees.mask import ancestor_mask
from treespec.trees.tree import TokenTree, root_only

DRAFTED = 6  # tokens of the draft model a cycle
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character decode to


@final
class StringMatch(Drafter):
    """A draft model and the tokens of each of B texts; one text at first.

    texts: observed tokens of the target. read: what each cache holds, in the draft model's tokens.
    """

    per_text = ("texts", "caches", "read")
    name = "model"
    given = True
    taps: tuple[int, ...] = ()

    def __init__(self, model: Target, target: Target) -> None:
        self.model, self.target = model, target
        self.texts: list[list[int]] = [[]]
        self.caches, self.read = [model.new_cache()], [list[int]()]

    @property
    def models(self) -> list[nn.Module]:
        return [self.model.model]

    @property
    def lengths(self) -> list[int]:
        return [len(text) for text in self.texts]

    @torch.no_grad()
    def draft_trees(
        self,
        roots: Tensor,
        laws: Sequence[Law],
        generators: Sequence[torch.Generator],
        cache: TreeCache,
        now: Callable[[], float] = time.perf_counter,
    ) -> list[TokenTree]:
        trees = []
        for row, (root, law) in enumerate(zip(roots.split(1), laws, strict=True)):
            chain = law.forced()
            text = [*self.texts[row], *root.tolist(), *chain]
            tree = root_only(root.new_tensor(text[-1:]))
            started = now()
            drafted = [] if law.over else self._drafted(row, text)
            self.forward_seconds += now() - started
            if drafted:
                number = torch.arange(1 + len(drafted), device=root.device)
                tokens = root.new_tensor([text[-1], *drafted])
                above = ancestor_mask(number - 1, len(drafted))
                tree = TokenTree(tokens, number - 1, number, above)
            trees.append(hung_below(root, chain, tree) if chain else tree)
        return trees

    def _drafted(self, row: int, text: list[int]) -> list[int]:
        """The target's tokens for what the draft model says after a text."""
        # 1. The text in its tokens. An incomplete character waits for its end.
        ours, theirs = self.target.tokenizer, self.model.tokenizer
        words = ours.decode(text, clean_up_tokenization_spaces=False)
        if words.endswith(INCOMPLETE):
            return []
        ids: list[int] = theirs.encode(words)
        if not ids:
            return []

        # 2. Its next tokens, behind the prefix that the cache has.
        cache, read = self.caches[row], self.read[row]
        cache.rewind([min(common_prefix(ids, read), len(ids) - 1)])
        said, waiting = list[int](), ids[cache.lengths[0] :]  # recurrent layers may go back further
        while len(said) < DRAFTED:
            tokens = torch.tensor([waiting], device=self.model.output_device)
            hidden = self.model.prefill(cache, tokens)[:, -1]
            said.append(int(self.model.output_logits(hidden).argmax(-1)))
            if said[-1] in self.model.eos:
                said.pop()
                break
            waiting = said[-1:]
        self.read[row] = (ids + said)[: cache.lengths[0]]

        # 3. Its words in the target's tokens, as they follow the last one.
        before = theirs.decode(ids, clean_up_tokenization_spaces=False)
        after = theirs.decode(ids + said, clean_up_tokenization_spaces=False)
        if not after.startswith(before):
            return []
        more = after[len(before) :].rstrip(INCOMPLETE)
        last = ours.decode(text[-1:], clean_up_tokenization_spaces=False)
        found: list[int] = ours.encode(last + more, add_special_tokens=False)
        if found[:1] == text[-1:]:
            return found[1:]
        return list(ours.encode(more, add_special_tokens=False)) if more else []

    def settle(self, paths: Sequence[Sequence[int]], outs: Sequence[TreeOutput]) -> None:
        """It learns from the text alone."""

    def observe(self, features: Sequence[Tensor], tokens: Sequence[Tensor]) -> None:
        for row, new in enumerate(tokens):
            self.texts[row] = self.texts[row] + new[:-1].tolist()

    def rewind(self, lengths: Sequence[int]) -> None:
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def new(self) -> "StringMatch":
        return StringMatch(self.model, self.target)
