"""What a verifier is told and what it answers, cycle by cycle: a witness that stands in its place and changes nothing.

Of the draws it keeps their places in the law that they are said to come from. `DRAWS` says what that law is under each
scheme, once more and apart from the scheme's own code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treespec.eval.certify.bets import ODDS, POWERS, on_odds, on_powers
from treespec.sampling import TargetLaws
from treespec.spec import Spec
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.scheme import Scheme
from treespec.verify.walk import Verdict, Verifier, is_paced

# How the draws at a node come about, by the scheme's name. Beside them a node may have sure tokens.
DRAWS = {
    **dict.fromkeys(
        ("single", "rrs", "kseq", "is-lp", "otm-lp", "optimal", "valued"), "independent"
    ),
    "rrs-wo": "without replacement",
    "greedy": "the last",
    "spechub": "the first",
}


@dataclass(frozen=True)
class Cycle:
    """One verdict. tokens: n committed. draws: [m] places in the order of q of all draws of the tree.

    first: [I] places, in the order of the tokens' numbers, of the first draw at each inner node, in drawing order.
    repeated: [r] places in q of all but a node's first draw, with the tokens drawn there before in front.
    hotter: [m, POWERS] bets that the draws come from a power of their law.
    rarer: [r, ODDS] bets that all but a node's first draw repeat one more often, or less.
    root_law: [V] q at the root, None where nothing was drawn there.
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
    """A verifier that asks another and keeps the cycles of each text, which its generator tells apart."""

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier
        self.texts: dict[torch.Generator, list[Cycle]] = {}  # in the order in which they begin
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
        nothing = torch.empty(0, dtype=torch.float64)
        if drafts is None:
            no_bets = nothing.view(0, len(POWERS)), nothing.view(0, len(ODDS))
            return Cycle(tokens, nothing, nothing, nothing, *no_bets, None)
        at_root = drafts.q[drafts.nodes == 0].flatten(0, -2)[:1]
        root_law = at_root[0] if len(at_root) else None
        laws, draws, is_first = drawn(self.scheme.name, drafts)
        by_law = placed(laws, laws, draws[:, None], self.coins)
        of_first, number = laws[is_first], torch.arange(laws.shape[-1], device=laws.device)
        by_number = placed(of_first, number.expand_as(of_first), draws[is_first, None], self.coins)
        places = by_law.squeeze(1).cpu(), by_number.squeeze(1).cpu()
        hotter = on_powers(laws, draws).cpu()
        repeated, rarer = nothing, nothing.view(0, len(ODDS))
        if DRAWS.get(self.scheme.name) == "independent":
            repeated, happened, chance = repeats_among(drafts, self.coins)
            repeated, rarer = repeated.cpu(), on_odds(happened, chance).cpu()
        return Cycle(tokens, *places, repeated, hotter, rarer, root_law)


@contextmanager
def watched(spec: Spec) -> Iterator[Witness]:
    """Inside, all cycles of `spec` are seen."""
    decoder = spec.decoder
    own, decoder.verifier = decoder.verifier, Witness(decoder.verifier)
    try:
        yield decoder.verifier
    finally:
        decoder.verifier = own


def drawn(scheme: str, drafts: Drafts) -> tuple[Tensor, Tensor, Tensor]:
    """The draws that chance made: [m, V] the law of each, not normalised; [m] tokens; [m] is it its node's first.

    Nothing for a scheme that is not in `DRAWS`.
    """
    q, tokens = drafts.q, drafts.draws.tokens
    laws, draws, is_first = [q[:0].flatten(0, -2)], [tokens[:0, 0]], [tokens[:0, 0] >= 0]
    present = tokens >= 0
    sure = for_sure(drafts.draws)
    left = q  # what the next draw comes from
    kind = DRAWS.get(scheme)
    by_chance = present & ~sure if kind else torch.zeros_like(present)
    if kind == "the last":
        by_chance &= present.sum(1, keepdim=True) - 1 == torch.arange(
            tokens.shape[1], device=tokens.device
        )
        sure = present & ~by_chance
    elif kind == "the first":
        by_chance[:, 1:] = False
    if bool(sure.any()):
        left = without(q, tokens, sure)
    seen = torch.zeros_like(present[:, 0])
    for column in range(tokens.shape[1]):
        rows, token = by_chance[:, column], tokens[:, column]
        law = left[:, column] if left.dim() == 3 else left
        laws.append(law[rows])
        draws.append(token[rows])
        is_first.append(~seen[rows])
        seen = seen | rows
        if kind == "without replacement":
            left = without(left, token[:, None], rows[:, None])
    return torch.cat(laws), torch.cat(draws), torch.cat(is_first)


def repeats_among(drafts: Drafts, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Of independent draws from one law, all but the first of each node, [r] each:

    their places with the tokens drawn before at the node in front; whether each repeats one of
    them; and with what probability it was to. A scheme may hand its draws over in an order that
    depends on them, so they are shuffled first.
    """
    if drafts.q.dim() == 3:
        nothing = torch.empty(0, dtype=torch.float64)
        return nothing, nothing.bool(), nothing
    tokens, sure = drafts.draws.tokens, for_sure(drafts.draws)
    law, tokens = without(drafts.q, tokens, sure), tokens.masked_fill(sure, -1)
    shuffle, coin = torch.rand((2, *tokens.shape), generator=generator, dtype=torch.float64).to(
        law.device
    )
    tokens = tokens.gather(1, shuffle.masked_fill(tokens < 0, 2).argsort(dim=1))
    again = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
    share = law.gather(1, tokens.clamp(min=0)).double() / law.sum(
        -1, keepdim=True, dtype=torch.float64
    )
    share = share.masked_fill(again | (tokens < 0), 0)
    before = share.cumsum(1) - share
    place = torch.where(again, coin * before, before + coin * (1 - before))
    present = tokens[:, 1:] >= 0
    return place[:, 1:][present], again[:, 1:][present], before[:, 1:][present]


def for_sure(draws: Draws) -> Tensor:
    """[I, K] bool: there for sure, not by chance."""
    if draws.sure is None:
        return torch.zeros_like(draws.tokens, dtype=torch.bool)
    return (draws.tokens >= 0) & draws.sure


def without(law: Tensor, tokens: Tensor, gone: Tensor) -> Tensor:
    """[I, V] the law with no mass on those of the tokens [I, K] that are gone."""
    return law.scatter_reduce(1, tokens.clamp(min=0), (~gone).to(law.dtype), "prod")


def placed(law: Tensor, order: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """[..., 1] float64 the share of the mass that stands before the chosen token in an order, and a part of its own.

    law, order: [..., V], the law need not sum to 1. chosen: [..., 1] int64. generator: of the coins that choose the
    part, on the host. Tokens of equal order count as one with the chosen one. Uniform where the token has this law.
    """
    at = order.gather(-1, chosen)
    before = (law * (order < at)).sum(-1, keepdim=True, dtype=torch.float64)
    same = (law * (order == at)).sum(-1, keepdim=True, dtype=torch.float64)
    coin = torch.rand(chosen.shape, generator=generator, dtype=torch.float64).to(law.device)
    return (before + coin * same) / law.sum(-1, keepdim=True, dtype=torch.float64)
