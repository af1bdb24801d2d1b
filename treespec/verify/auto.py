"""The default verifier: for each cycle's tree the verification that accepts most.

    root alone, or the likeliest tokens     the walk over `topk`
    a chain of draws                        block verification
    a tree of draws without replacement     traversal verification

The tree of a cycle depends on the text's past alone (`treespec.draft.grow.auto`), and each of these
verifiers is lossless for its trees. So the text keeps the target's law.
"""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from treespec.shaping.sampling import TargetDistributions
from treespec.trees.tree import TokenTree
from treespec.verify.block import Block
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.topk import TopK
from treespec.verify.traversal import Traversal
from treespec.verify.walk import Verdict, Walk


@final
@dataclass(frozen=True)
class Auto:
    """Judges the trees of `auto`. Sampled children are drawn as for `rrs-wo`."""

    name: ClassVar[str] = "auto"
    scheme: ClassVar[Scheme] = RRSWithoutReplacement()
    paced: ClassVar[bool] = True

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetDistributions, generator: torch.Generator
    ) -> Verdict:
        """p: [N, V] probabilities."""
        if tree.drafts is None:
            return Walk(TopK())(tree, p, generator)
        draws = tree.drafts.draws
        if draws.tokens.shape[1] == 1 and draws.sure is None:
            return Block()(tree, p, generator)
        return Traversal()(tree, p, generator)
