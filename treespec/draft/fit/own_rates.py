"""Count how often the first, second, … draw of a node is accepted while the target writes.

Teacher-forced text tells less: drafts are right more often on the target's own text than on other
text.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from treespec.decoding.decode import Decoder
from treespec.decoding.sequence import Text
from treespec.decoding.stats import Stats
from treespec.draft.proposer import Proposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.model.target import Target
from treespec.shaping.law import Law
from treespec.shaping.sampling import SamplingParams, TargetLaws
from treespec.text.ending import Ending
from treespec.trees.static import StaticTree, eagle
from treespec.trees.tree import TokenTree
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Verdict, Walk

COLDEST = 0.01  # in place of temperature 0, where all draws are the likeliest tokens


@final
class Counted:
    """The walk over draws without replacement. It counts how often each was judged and accepted."""

    name = "counted"
    scheme: Scheme = RRSWithoutReplacement()

    def __init__(self, tree: StaticTree) -> None:
        self.walk = Walk(self.scheme)
        self.judged, self.accepted = torch.zeros(2, tree.max_draws, dtype=torch.float64)  # [K] each

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        verdict = self.walk(tree, p, generator)
        if tree.drafts is None:
            return verdict
        row_of = {node: row for row, node in enumerate(tree.drafts.nodes.tolist())}
        drawn = tree.drafts.draws.tokens  # [I, K]
        for node, token in zip([0, *verdict.path], verdict.tokens, strict=True):
            if node in row_of:
                draws = drawn[row_of[node]].cpu()
                hit = (draws == token).double()
                self.judged += (draws >= 0) * (1 - hit.cumsum(0) + hit)
                self.accepted += hit
        return verdict


def own_rates(
    target: Target,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    tokens: int = 48,
    seed: int = 0,
) -> tuple[float, ...]:
    """[K] Pr(the k-th draw without replacement is accepted), counted over answers to prompts.

    prompts: token ids, at least one each. tokens: the most tokens of an answer. Draws that were
    never judged have no rate.
    """
    # 1. Decode and count.
    tree = eagle().cut(proposer.max_depth) if proposer.max_depth else eagle()
    counted = Counted(tree)
    decoder = Decoder(target, TreeDrafter(proposer.new(), tree, counted.scheme), counted)
    law = Law(SamplingParams(max(temperature, COLDEST)))
    for i, prompt in enumerate(prompts):
        generator = torch.Generator(device=target.output_device).manual_seed(seed + i)
        ending = Ending(None, target.eos, (), min(tokens, target.context_length - len(prompt)))
        for _ in decoder.run([Text(list(prompt), ending, generator, Stats(), law)]):
            pass

    # 2. From chances given that earlier draws were refused, to unconditional ones.
    chances = (counted.accepted / counted.judged)[counted.judged > 0]
    refused = (1 - chances).cumprod(0)
    return tuple((chances * torch.cat([refused.new_ones(1), refused[:-1]])).tolist())
