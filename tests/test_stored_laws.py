"""The q that a tree stores is the law that its tokens were drawn from.

Each tree is drawn again: `draw` with a generator of the same seed, from the stored q alone, level by level. And q is
`probs` of the draft logits at its node, which are a function of the node's token here.
"""

from dataclasses import astuple

import numpy as np
import pytest
import torch
from enumeration import STOCHASTIC
from models import TableConfig, TableModel, draft_tree, follow, random_head
from mutants import mutant
from torch import Tensor

from treespec.draft.calibration import Calibration
from treespec.draft.grow import drawn, fixed
from treespec.draft.grow.drawn import Sampled
from treespec.draft.grow.fixed import draft_laws
from treespec.draft.grow.growth import Growth
from treespec.draft.outlines import outline
from treespec.draft.trained.proposers import EagleProposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.draft.vocabulary import restrict
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams
from treespec.trees.layout import layout
from treespec.trees.policy import policy
from treespec.trees.sampled import allot
from treespec.trees.static import StaticTree
from treespec.trees.tree import Drafts, Draws, TokenTree
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme

PARAMS = SamplingParams(0.9, top_k=5)
VOCABULARY, SEEDS = 8, range(4)
MIXED = Calibration((0.2, 0.1, -4, 0), (-0.3, 0.2, -0.1, 0, -0.4, 0, 0))  # tops and draws at a node
STATIC = ["chain:3", "3x2", "2x3", "eagle"]
TEMPERATURES = "draft-temperatures=0.5/1/2"
SCHEMES = [*STOCHASTIC, f"rrs:{TEMPERATURES}", f"is-lp:{TEMPERATURES}", "optimal:threshold=1"]
TABLE = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))  # logits after a token


def grown(growth: Growth, table: Tensor = TABLE) -> TokenTree:
    """Root token 0; a frontier is sent the logits after its tokens."""
    try:
        frontier = next(growth)
        while True:
            frontier = growth.send(table[frontier.tokens])
    except StopIteration as end:
        return end.value


def check_laws(tree: TokenTree, scheme: Scheme, width: int, table: Tensor = TABLE) -> None:
    """q is the law of the logits after the token of its node. width: draws of the widest node.

    Where each draw has a law, an absent draw may have none.
    """
    assert tree.drafts
    at = tree.tokens[tree.drafts.nodes].clamp_min(0)
    wanted, found = draft_laws(table[at], scheme, PARAMS, width), tree.drafts.q
    if found.dim() == 3:
        drawn = tree.drafts.draws.tokens >= 0
        wanted, found = wanted[drawn], found[drawn]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def check_draws(drafts: Drafts, rows: slice, again: Draws) -> None:
    """Drawn again from the stored q, rows of one level are the same; beyond them only absent draws."""
    width = again.tokens.shape[1]
    assert (drafts.draws.tokens[rows, width:] == -1).all()
    stored = drafts.draws.each(lambda field: field[rows, :width])
    for one, other in zip(astuple(stored), astuple(again), strict=True):
        assert other is None or torch.equal(one, other)


def check_static(tree: TokenTree, shape: StaticTree, scheme: Scheme, generator: torch.Generator) -> None:
    """Level by level; and the nodes carry what was drawn for them."""
    assert tree.drafts
    first = 0
    for level in layout(shape, torch.device("cpu")).levels:
        rows = slice(first, first + len(level.draws))
        below = tree.drafts.draws.tokens[rows][level.rows, level.columns]
        check_draws(tree.drafts, rows, scheme.draw(tree.drafts.q[rows], level.draws, generator))
        assert torch.equal(tree.drafts.nodes[rows], level.nodes)
        assert torch.equal(tree.tokens[level.first : level.first + len(below)], below)
        first = rows.stop
    assert first == len(tree.drafts.nodes)


def generators(seed: int) -> tuple[torch.Generator, torch.Generator]:
    return torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)


def shape_of(name: str, scheme: Scheme) -> StaticTree:
    shape = policy(name)
    assert isinstance(shape, StaticTree)
    if scheme.max_draws and shape.max_draws > scheme.max_draws:
        pytest.skip(f"{scheme.name} answers {scheme.max_draws} draws")
    return shape


@pytest.mark.parametrize("tree", STATIC)
@pytest.mark.parametrize("name", SCHEMES)
def test_a_static_tree_stores_the_laws_that_its_tokens_were_drawn_from(name: str, tree: str) -> None:
    scheme = scheme_by_name(name)
    shape = shape_of(tree, scheme)
    for seed in SEEDS:
        one, two = generators(seed)
        found = grown(fixed.grow_fixed(torch.tensor([0]), TABLE[:1], shape, scheme, PARAMS, one))
        check_static(found, shape, scheme, two)
        check_laws(found, scheme, shape.max_draws)


@pytest.mark.parametrize("name", SCHEMES)
def test_so_does_a_chain_that_ends_where_the_draft_is_unsure(name: str) -> None:
    scheme, depths = scheme_by_name(name), set()
    by = drawn.Confident(scheme, 4, 0.3)
    for seed in range(8):
        one, two = generators(seed)
        found = grown(drawn.grow_confident(torch.tensor([0]), TABLE[:1], by, PARAMS, one))
        depths.add(len(found.tokens) - 1)
        check_static(found, shape_of(f"chain:{len(found.tokens) - 1}", scheme), scheme, two)
        check_laws(found, scheme, 1)
    assert len(depths) > 1


def check_sampled(tree: TokenTree, by: Sampled, generator: torch.Generator) -> None:
    """How many draws each node got is settled by the stored q and by the reach of its path, as told from the root."""
    drafts = tree.drafts
    assert drafts
    reach, first, node = {0: 1.0}, 0, 1
    for depth in range(int(tree.depth[drafts.nodes].max()) + 1):
        rows = slice(first, first + int((tree.depth[drafts.nodes] == depth).sum()))
        chances = by.calibration.chances(outline(drafts.q[rows]), depth)
        above = np.array([reach[at] for at in drafts.nodes[rows].tolist()])
        k, child_reach = allot(above, *chances, by.price, by.scheme.equal_draws)
        number, sure = torch.from_numpy(k).unbind(-1)
        check_draws(drafts, rows, by.scheme.draw_with_sure(drafts.q[rows], number, sure, generator))
        for row, at in enumerate(drafts.nodes[rows].tolist()):
            for token, chance in zip(drafts.draws.tokens[first + row].tolist(), child_reach[row], strict=False):
                if token >= 0 and chance > 0:
                    assert (tree.tokens[node], tree.parents[node]) == (token, at)
                    reach[node], node = float(chance), node + 1
        first = rows.stop
    assert (first, node) == (len(drafts.nodes), len(tree.tokens))


@pytest.mark.parametrize("price", [0.02, 0.06])
@pytest.mark.parametrize("name", ["rrs-wo", "optimal", "optimal:first=1"])
def test_so_does_a_sampled_tree(name: str, price: float) -> None:
    by = Sampled(scheme_by_name(name), MIXED, 3, price)
    for seed in SEEDS:
        one, two = generators(seed)
        found = grown(drawn.grow_sampled(torch.tensor([0]), TABLE[:1], by, PARAMS, one))
        assert found.depth.max() > 1
        check_sampled(found, by, two)
        check_laws(found, by.scheme, 1)


@pytest.mark.parametrize(("tree", "name"), [("3x2", "rrs-wo"), ("2x2", f"rrs:{TEMPERATURES}"), ("2x2", "greedy")])
def test_in_a_draft_vocabulary_it_is_the_law_over_the_targets_tokens(tree: str, name: str) -> None:
    """0 on the tokens that are not drafted, so that `draw` gives the same ones."""
    target = Target(TableModel(TableConfig(VOCABULARY, seed=1)))
    head, drafted = random_head(target, seed=2), torch.tensor([1, 2, 4, 6])
    restrict(head, target, drafted)
    scheme, text = scheme_by_name(name), torch.tensor([1, 2, 0, 3, 1])
    for seed in SEEDS:
        proposer = EagleProposer(head, target)
        follow(proposer, target.features(text[None])[0], text)
        one, two = generators(seed)
        found = draft_tree(TreeDrafter(proposer, policy(tree), scheme), text[-1:], PARAMS, one)
        check_static(found, shape_of(tree, scheme), scheme, two)
        assert found.drafts
        assert found.drafts.q.shape[-1] == VOCABULARY
        assert found.drafts.q[..., [0, 3, 5]].sum() == 0


LEVEL = "levels.append((level.nodes, q, drawn))"
MUTANTS = {
    "a flatter law": "q.sqrt(), drawn",
    "the law of a sibling": "q.roll(1, 0), drawn",
    "what another seed draws": "q, scheme.draw(q, level.draws, generator)",
}


@pytest.mark.parametrize("change", MUTANTS)
def test_the_same_checks_find_mutants(change: str) -> None:
    other = mutant(fixed, (LEVEL, f"levels.append((level.nodes, {MUTANTS[change]}))"))
    scheme, shape = scheme_by_name("rrs-wo"), policy("3x2")
    one, two = generators(0)
    found = grown(other.grow_fixed(torch.tensor([0]), TABLE[:1], shape, scheme, PARAMS, one))
    with pytest.raises(AssertionError):
        check_static(found, shape, scheme, two)


def test_the_same_checks_find_laws_of_the_wrong_rows_of_a_sampled_tree() -> None:
    other = mutant(drawn, ("to(q.device), q, drawn", "to(q.device), q.roll(1, 0), drawn"))
    by = Sampled(scheme_by_name("rrs-wo"), MIXED, 3, 0.02)
    one, two = generators(0)
    found = grown(other.grow_sampled(torch.tensor([0]), TABLE[:1], by, PARAMS, one))
    with pytest.raises(AssertionError):
        check_sampled(found, by, two)
