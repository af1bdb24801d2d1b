"""A chain that ends where the draft is unsure."""

import pytest
import torch
from models import TableConfig, TableModel, target
from test_decode import prompt
from test_draft_model import small

from treespec.api.spec import Spec
from treespec.draft.models.model import ModelProposer, SeveralModels
from treespec.draft.pairing import check_pair
from treespec.draft.tree_drafter import TreeDrafter
from treespec.errors import InputError
from treespec.model.cache import TreeCache
from treespec.model.target import Target
from treespec.shaping.distribution import Distribution as TextLaw
from treespec.shaping.sampling import SamplingParams, probs
from treespec.trees.confident import ConfidentChain
from treespec.trees.policy import policy
from treespec.verify.registry import SCHEMES, scheme_by_name


@pytest.fixture(scope="module")
def tables():
    return [Target(TableModel(TableConfig(4, seed=seed))) for seed in (1, 2)]


def chains(tables, verifier, params, runs=40, tree="confident:depth=6,threshold=.5"):
    """(tree, law of the draft at temperature 1 after each of its tokens) from a text of two tokens."""
    proposer = ModelProposer(tables[1], tables[0])
    proposer.observe([torch.empty(1, 4)], [torch.tensor([1, 2])])
    drafter = TreeDrafter(proposer, policy(tree), scheme_by_name(verifier))
    generator = torch.Generator().manual_seed(3)
    for _ in range(runs):
        (grown,) = drafter.draft_trees(torch.tensor([2]), [TextLaw(params)], [generator], TreeCache(1))
        text = torch.tensor([[1, *grown.tokens.tolist()]])
        yield grown, tables[1].model(text).logits[0, 1:]


@pytest.mark.parametrize("verifier", ["single", "rrs", "rrs-wo", "topk"])
def test_a_chain_goes_on_while_its_last_token_was_likely_enough_and_keeps_that_token(tables, verifier):
    params, lengths = SamplingParams(temperature=0.7, top_k=3), set()
    for tree, logits in chains(tables, verifier, params):
        n = len(tree.tokens)
        sure = logits.softmax(-1).gather(1, tree.tokens.roll(-1)[:, None])[:-1, 0]
        assert (sure[:-1] >= 0.5).all()
        assert n == 7 or sure[-1] < 0.5
        assert tree.parents.tolist() == list(range(-1, n - 1))
        assert torch.equal(tree.ancestors, torch.ones(n, n).tril() > 0)
        if verifier == "topk":
            assert tree.drafts is None
        else:
            assert torch.allclose(tree.drafts.q, probs(logits[:-1], params), atol=1e-5)
            assert torch.equal(tree.drafts.draws.tokens[:, 0], tree.tokens[1:])
        lengths.add(n)
    assert len(lengths) > 1 or verifier == "topk"


def test_the_threshold_follows_what_was_accepted():
    """β₁ .5, goal .9, ε .01, β₂ .9, chains of at most 4, by hand."""
    chain, threshold, rate = ConfidentChain(depth=4), 0.8, 0.0
    for accepted, drafted, wanted, known in [
        (2, 2, 0.801, 0.5),  # below the goal yet
        (2, 2, 0.802, 0.75),
        (1, 1, 0.803, 0.875),
        (3, 3, 0.802, 0.9375),  # above: less sure will do
        (4, 4, 0.802, 0.96875),  # as long as it may be: nothing to gain
        (0, 4, 0.803, 0.484375),
    ]:
        threshold, rate = chain.update((threshold, rate), accepted, drafted)
        assert (threshold, rate) == (pytest.approx(wanted), pytest.approx(known))


def test_each_text_has_a_threshold_of_its_own_from_its_first_cycle_on():
    spec = Spec(target("llama"), ModelProposer(target("llama"), target("llama")), "confident:depth=3,threshold=.2")
    spec.generate(prompt(), max_new_tokens=20)
    assert spec.decoder.drafter.builders[0].known[0] != 0.2
    alone = [spec.generate(prompt(seed=seed), max_new_tokens=20) for seed in (3, 4)]
    together = spec.generate([prompt(seed=seed) for seed in (3, 4)], max_new_tokens=20)
    assert [out.stats.accepted for out in together] == [out.stats.accepted for out in alone]
    assert [out.stats.drafted for out in together] == [out.stats.drafted for out in alone]


def test_a_model_that_is_the_target_is_accepted_whole_however_long_the_chain():
    spec = Spec(target("llama"), ModelProposer(target("llama"), target("llama")), "confident:threshold=.06", "single")
    stats = spec.generate(prompt(), max_new_tokens=40, temperature=1.0, seed=1).stats
    assert 0 <= sum(stats.drafted) - sum(stats.accepted) <= 8  # the last chain is cut where the text ends
    assert len(set(stats.accepted)) > 2


def test_every_scheme_may_have_it_as_it_makes_one_draw():
    for scheme in SCHEMES.values():
        check_pair(ConfidentChain(), scheme)


def test_several_models_have_no_one_confidence():
    several = SeveralModels([ModelProposer(small(seed), target("llama")) for seed in (5, 6)])
    with pytest.raises(InputError, match="fixed shape"):
        Spec(target("llama"), several, "confident", "rrs")
