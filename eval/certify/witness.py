"""A witness: it stands in a verifier's place, changes nothing, and keeps what each cycle showed.

Of the draws it keeps their places in the law that they are said to come from. The scheme says which
draws chance makes (`Scheme.chance`); their laws are computed here once more, apart from its code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.eval.certify.bets import ODDS, POWERS, on_odds, on_powers
from treespec.shaping.sampling import TargetLaws
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.facts import is_paced
from treespec.verify.scheme import Chance, Scheme
from treespec.verify.walk import Verdict, Verifier


@dataclass(frozen=True)
class Cycle:
    """One cycle of one text. Places are numbers in [0, 1], uniform if the draws have their law.

    tokens: the n committed tokens.
    draws: [m] the place of each draw of the tree in its law, tokens ordered by q.
    first: [I] the place of the first draw at each inner node, tokens ordered by number.
    repeated: [r] the place of every draw but a node's first, with the tokens drawn earlier at the
    node in front.
    hotter: [m, POWERS] bets that the draws come from a power of their law.
    rarer: [r, ODDS] bets that draws repeat an earlier one more often, or less.
    root_law: [V] q at the root; None where the root has no draws.
    """

    tokens: list[int]
    draws: Tensor
    first: Tensor
    repeated: Tensor
    hotter: Tensor
    rarer: Tensor
    root_law: Tensor | None


@final
class Witness:
    """A verifier that returns the verdicts of another and keeps the cycles of each text.

    texts: the cycles of each text, by its generator, in the order in which the texts begin.
    """

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.texts: dict[torch.Generator, list[Cycle]] = {}
        self.coins = torch.Generator().manual_seed(0)

    @property
    def name(self) -> str:
        return self.verifier.name

    @property
    def scheme(self) -> Scheme:
        return self.verifier.scheme

    @property
    def paced(self) -> bool:
        return is_paced(self.verifier)

    def __call__(
        self, tree: TokenTree, p: Tensor | TargetLaws, generator: torch.Generator
    ) -> Verdict:
        verdict = self.verifier(tree, p, generator)
        self.texts.setdefault(generator, []).append(self.cycle(verdict.tokens, tree.drafts))
        return verdict

    def cycle(self, tokens: list[int], drafts: Drafts | None) -> Cycle:
        """What a cycle showed. tokens: its committed tokens. drafts: those of its tree."""
        # 1. A tree without draws shows its tokens alone.
        nothing = torch.empty(0, dtype=torch.float64)
        if drafts is None:
            no_bets = nothing.view(0, len(POWERS)), nothing.view(0, len(ODDS))
            return Cycle(tokens, nothing, nothing, nothing, *no_bets, None)

        # 2. The places of the draws, and bets on powers of their laws.
        at_root = drafts.q[drafts.nodes == 0].flatten(0, -2)[:1]
        root_law = at_root[0] if len(at_root) else None
        laws, draws, is_first = drawn(self.scheme.chance, drafts)
        by_law = placed(laws, laws, draws[:, None], self.coins)
        of_first, number = laws[is_first], torch.arange(laws.shape[-1], device=laws.device)
        by_number = placed(of_first, number.expand_as(of_first), draws[is_first, None], self.coins)
        places = by_law.squeeze(1).cpu(), by_number.squeeze(1).cpu()
        hotter = on_powers(laws, draws).cpu()

        # 3. Independent draws repeat one another as often as chance says.
        repeated, rarer = nothing, nothing.view(0, len(ODDS))
        if self.scheme.chance == "independent":
            repeated, happened, chance = repeats_among(drafts, self.coins)
            repeated, rarer = repeated.cpu(), on_odds(happened, chance).cpu()
        return Cycle(tokens, *places, repeated, hotter, rarer, root_law)


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


def drawn(chance: Chance | None, drafts: Drafts) -> tuple[Tensor, Tensor, Tensor]:
    """The m draws that chance made.

    chance: as in `Scheme.chance`; None: there are no such draws.
    Returns the law of each [m, V], not normalised, its token [m], and whether it is the first at
    its node, [m] bool.
    """
    # 1. Which draws chance made, and which tokens are sure.
    q, tokens = drafts.q, drafts.draws.tokens
    laws, draws, is_first = [q[:0].flatten(0, -2)], [tokens[:0, 0]], [tokens[:0, 0] >= 0]
    present = tokens >= 0
    sure = for_sure(drafts.draws)
    by_chance = present & ~sure if chance else torch.zeros_like(present)
    if chance == "the last":
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        by_chance &= columns == present.sum(1, keepdim=True) - 1
        sure = present & ~by_chance
    elif chance == "the first":
        by_chance[:, 1:] = False

    # 2. The law of the next draw at each node, a column of draws at a time.
    left = without(q, tokens, sure) if bool(sure.any()) else q
    seen = torch.zeros_like(present[:, 0])
    for column in range(tokens.shape[1]):
        rows, token = by_chance[:, column], tokens[:, column]
        law = left[:, column] if left.dim() == 3 else left
        laws.append(law[rows])
        draws.append(token[rows])
        is_first.append(~seen[rows])
        seen = seen | rows
        if chance == "without replacement":
            left = without(left, token[:, None], rows[:, None])
    return torch.cat(laws), torch.cat(draws), torch.cat(is_first)


def repeats_among(drafts: Drafts, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Whether independent draws repeat one another, for all but the first draw of each node.

    A scheme's order of draws may depend on the tokens, so the draws of a node are shuffled first.
    Returns, for r draws: the place of each, with the tokens drawn earlier at the node in front;
    whether it repeats one of these; and the probability of that.
    """
    # 1. The draws of one law, in random order.
    if drafts.q.dim() == 3:
        nothing = torch.empty(0, dtype=torch.float64)
        return nothing, nothing.bool(), nothing
    tokens, sure = drafts.draws.tokens, for_sure(drafts.draws)
    law, tokens = without(drafts.q, tokens, sure), tokens.masked_fill(sure, -1)
    uniforms = torch.rand((2, *tokens.shape), generator=generator, dtype=torch.float64)
    shuffle, coin = uniforms.to(law.device)
    tokens = tokens.gather(1, shuffle.masked_fill(tokens < 0, 2).argsort(dim=1))

    # 2. The mass of the distinct tokens before each draw, which is its chance to repeat one.
    again = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    total = law.sum(-1, keepdim=True, dtype=torch.float64)
    share = law.gather(1, tokens.clamp(min=0)).double() / total
    share = share.masked_fill(again | (tokens < 0), 0)
    before = share.cumsum(1) - share
    place = torch.where(again, coin * before, before + coin * (1 - before))

    # 3. All but the first draw of each node.
    present = tokens[:, 1:] >= 0
    return place[:, 1:][present], again[:, 1:][present], before[:, 1:][present]


def for_sure(draws: Draws) -> Tensor:
    """[I, K] bool: whether a token is sure, not drawn."""
    if draws.sure is None:
        return torch.zeros_like(draws.tokens, dtype=torch.bool)
    return (draws.tokens >= 0) & draws.sure


def without(law: Tensor, tokens: Tensor, gone: Tensor) -> Tensor:
    """[I, V] the law without the mass of the tokens [I, K] that are `gone` [I, K]."""
    return law.scatter_reduce(1, tokens.clamp(min=0), (~gone).to(law.dtype), "prod")


def placed(law: Tensor, order: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """[..., 1] float64 the place of the chosen token in its law: uniform if it has this law.

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
