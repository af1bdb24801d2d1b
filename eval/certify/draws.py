"""What each cycle showed of its draws: their places in the distribution that they are said to come from.

The scheme says which draws chance makes (`Scheme.chance`); their distributions are computed here
once more, apart from its code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.eval.certify.statistics import ODDS, POWERS, on_odds, on_powers
from treespec.trees.tree import Drafts, TokenTree
from treespec.verify.scheme import Chance, Scheme
from treespec.verify.walk import Probabilities, Verdict, Verifier

NONE = torch.empty(0, dtype=torch.float64)
NO_POWERS, NO_ODDS = NONE.view(0, len(POWERS)), NONE.view(0, len(ODDS))


@dataclass(frozen=True)
class Cycle:
    """One cycle of one text. Places are numbers in [0, 1], uniform if the draws have their distribution.

    tokens: the n committed tokens.
    draws: [m] the place of each draw of the tree, tokens ordered by q.
    first: [I] the place of the first draw at each inner node, tokens ordered by number.
    hotter: [m, POWERS] bets that the draws come from a power of their distribution.
    rarer: [r, ODDS] bets that draws repeat an earlier one of their node more often, or less.
    root_law: [V] q at the root; None where the root has no draws.
    """

    tokens: list[int]
    draws: Tensor = NONE
    first: Tensor = NONE
    hotter: Tensor = NO_POWERS
    rarer: Tensor = NO_ODDS
    root_law: Tensor | None = None


@final
class Witness:
    """A verifier that returns the verdicts of another and keeps the cycles of each text.

    texts: the cycles of each text, by its generator, in the order in which the texts begin.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier, self.paced = verifier, verifier.paced
        self.texts: dict[torch.Generator, list[Cycle]] = {}
        self.coins = torch.Generator().manual_seed(0)

    @property
    def name(self) -> str:
        return self.verifier.name

    @property
    def scheme(self) -> Scheme:
        return self.verifier.scheme

    def __call__(self, tree: TokenTree, p: Probabilities, generator: torch.Generator) -> Verdict:
        verdict = self.verifier(tree, p, generator)
        cycle = Cycle(verdict.tokens)
        if tree.drafts is not None:
            cycle = shown(verdict.tokens, tree.drafts, self.scheme.chance, self.coins)
        self.texts.setdefault(generator, []).append(cycle)
        return verdict


@contextmanager
def watched(spec: Spec) -> Iterator[Witness]:
    """Inside, a witness keeps all cycles of `spec`."""
    decoder, verifier = spec.decoder, spec.decoder.verifier
    witness = Witness(verifier)
    decoder.verifier = witness
    try:
        yield witness
    finally:
        decoder.verifier = verifier


def shown(
    tokens: list[int], drafts: Drafts, chance: Chance | None, coins: torch.Generator
) -> Cycle:
    """What a cycle showed. tokens: its committed tokens. drafts: those of its tree."""
    at_root = drafts.q[drafts.nodes == 0].flatten(0, -2)
    laws, draws, is_first = drawn(chance, drafts)
    by_law = placed(laws, laws, draws[:, None], coins).squeeze(1)
    of_first = laws[is_first]
    number = torch.arange(laws.shape[-1], device=laws.device).expand_as(of_first)
    by_number = placed(of_first, number, draws[is_first, None], coins).squeeze(1)
    rarer = on_odds(*repeats_among(drafts, coins)) if chance == "independent" else NO_ODDS
    by_law, by_number, hotter, rarer = (
        x.cpu() for x in (by_law, by_number, on_powers(laws, draws), rarer)
    )
    return Cycle(tokens, by_law, by_number, hotter, rarer, at_root[0] if len(at_root) else None)


def drawn(chance: Chance | None, drafts: Drafts) -> tuple[Tensor, Tensor, Tensor]:
    """The m draws that chance made; none where `chance` is None.

    Returns the distribution of each [m, V], not normalised, its token [m], and whether it is the
    first at its node, [m] bool.
    """
    # 1. Which draws chance made, and which tokens are sure.
    tokens, sure = drafts.draws.tokens, sure_tokens(drafts)
    present = tokens >= 0
    by_chance = present & ~sure if chance else torch.zeros_like(present)
    if chance == "the last":
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        by_chance &= columns == present.sum(1, keepdim=True) - 1
        sure = present & ~by_chance
    elif chance == "the first":
        by_chance[:, 1:] = False

    # 2. The distribution of the next draw at each node, a column of draws at a time.
    left = without(drafts.q, tokens, sure) if bool(sure.any()) else drafts.q
    laws, is_first = [], (by_chance.cumsum(1) == 1) & by_chance
    for column, (token, rows) in enumerate(zip(tokens.T, by_chance.T, strict=True)):
        laws.append((left[:, column] if left.dim() == 3 else left)[rows])
        if chance == "without replacement":
            left = without(left, token[:, None], rows[:, None])
    return torch.cat(laws), tokens.T[by_chance.T], is_first.T[by_chance.T]


def repeats_among(drafts: Drafts, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Whether independent draws repeat one another, for all but the first draw of each node.

    Returns for r draws: whether each repeats an earlier one of its node, and the probability of that.
    The order of a node's draws may depend on its tokens, so they are taken in a random one.
    """
    # 1. The draws of one distribution, in an order that their tokens do not decide.
    if drafts.q.dim() == 3:
        return NONE.bool(), NONE
    sure = sure_tokens(drafts)
    law, tokens = (
        without(drafts.q, drafts.draws.tokens, sure),
        drafts.draws.tokens.masked_fill(sure, -1),
    )
    shuffle = torch.rand(tokens.shape, generator=generator).to(law.device)
    tokens = tokens.gather(1, shuffle.masked_fill(tokens < 0, 2).argsort(dim=1))

    # 2. The mass of the distinct tokens before each draw, which is its chance to repeat one.
    again = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    share = law.gather(1, tokens.clamp(min=0)).double() / law.sum(
        -1, keepdim=True, dtype=torch.float64
    )
    share = share.masked_fill(again | (tokens < 0), 0)
    before = share.cumsum(1) - share
    present = tokens[:, 1:] >= 0
    return again[:, 1:][present], before[:, 1:][present]


def sure_tokens(drafts: Drafts) -> Tensor:
    """[I, K] bool: whether a token is sure, not drawn."""
    sure, tokens = drafts.draws.sure, drafts.draws.tokens
    return torch.zeros_like(tokens, dtype=torch.bool) if sure is None else (tokens >= 0) & sure


def without(law: Tensor, tokens: Tensor, gone: Tensor) -> Tensor:
    """[I, V] the distribution without the mass of the tokens [I, K] that are `gone` [I, K]."""
    return law.scatter_reduce(1, tokens.clamp(min=0), (~gone).to(law.dtype), "prod")


def placed(law: Tensor, order: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """[..., 1] float64 the place of the chosen token in its distribution: uniform if it is drawn from it.

    The place is the mass before the token in an order, plus a random part of its own mass. Tokens
    of equal order count as one. Five tokens, the chosen one in brackets, a coin of .5:

        order      1    2   [3]   4    5
        law       .1   .2   .4   .2   .1        place .1 + .2 + .5 * .4 = .5

    law, order: [..., V]; the law need not sum to 1. chosen: [..., 1] int64.
    generator: for the coins, on the host.
    """
    at = order.gather(-1, chosen)
    before = (law * (order < at)).sum(-1, keepdim=True, dtype=torch.float64)
    same = (law * (order == at)).sum(-1, keepdim=True, dtype=torch.float64)
    coin = torch.rand(chosen.shape, generator=generator, dtype=torch.float64).to(law.device)
    return (before + coin * same) / law.sum(-1, keepdim=True, dtype=torch.float64)
