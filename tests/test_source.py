"""Whatever drafts for a target becomes one kind of source, and rows of texts come and go in step."""

import pytest
from drafting import source_of
from models import as_undrafted, random_head, target

from treespec.api.spec import Spec
from treespec.draft.drafter import Drafter, PerText
from treespec.draft.drafters import DrafterSpec
from treespec.draft.source import source_for
from treespec.draft.trained.proposers import EagleProposer
from treespec.trees.tree import root_only
from treespec.verify.topk import TopK
from treespec.verify.walk import Walk


class NoDrafts(Drafter):
    """A drafter as a user would write one: it counts the texts' positions and drafts nothing."""

    per_text = ("counts",)

    def __init__(self):
        self.counts = [0]

    def draft_trees(self, roots, laws, generators, cache, now=None):
        assert self.counts == cache.lengths
        return [root_only(root) for root in roots.split(1)]

    def update(self, paths, outs):
        pass

    def observe(self, features, tokens):
        self.counts = [count + len(new) - 1 for count, new in zip(self.counts, tokens, strict=True)]

    def rewind(self, lengths):
        self.counts = list(lengths)

    def new(self):
        return NoDrafts()


def test_a_head_its_proposer_and_their_source_draft_the_same():
    model = target("llama")
    head = random_head(model)
    proposer = EagleProposer(head, model)
    source = source_for(head, model)
    assert (source.name, source.head, list(source.models)) == ("eagle head", head, [head])
    assert source_for(source, model) is source
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    answers = [
        Spec(model, drafting, "2x2", "rrs").generate([5, 9, 7], **options) for drafting in (head, proposer, source)
    ]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert len({tuple(answer.stats.accepted) for answer in answers}) == 1


def test_a_drafter_of_given_tokens_is_a_source_too():
    model = target("llama")
    lookup = source_of("lookup", model)
    assert (lookup.name, lookup.proposer, list(lookup.models)) == ("lookup", None, [])


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_drafter_of_ones_own_serves_texts_that_enter_and_leave(batch):
    """Its positions of each text are the cache's at every cycle, or it stops."""
    model, texts = target("llama"), [[5, 9, 7], [4], [8, 3, 11, 30], [21, 6]]
    spec = Spec(model, NoDrafts())
    as_undrafted(spec, texts, 10, batch=batch)
    assert "nodrafts" in repr(spec)


class Rows(PerText):
    per_text = ("numbers", "inner")

    def __init__(self, *numbers, inner=None):
        self.numbers, self.inner = list(numbers), inner


def test_rows_join_and_leave_in_every_field():
    one, two = (Rows(*numbers, inner=Rows(*map(str, numbers), inner=Leaf())) for numbers in ((1, 2), (3,)))
    one.join([two])
    assert (one.numbers, one.inner.numbers, two.numbers) == ([1, 2, 3], ["1", "2", "3"], [3])
    one.select([2, 0])
    assert (one.numbers, one.inner.numbers) == ([3, 1], ["3", "1"])


class Leaf(PerText):
    """State without rows."""


def test_a_cycle_counts_the_draft_models_seconds_apart():
    model = target("llama")
    spent = Spec(model, random_head(model), "2x2", "rrs").generate([5, 9, 7], max_new_tokens=12).stats.seconds
    assert 0 < spent["head"] <= spent["draft"]


class Own:
    """A verifier with what `Verifier` names, and nothing else."""

    name, scheme, coupled = "own", TopK(), False

    def __call__(self, tree, p, generator):
        return Walk(self.scheme)(tree, p, generator)


@pytest.mark.parametrize("tree", ["chain:3", None])
def test_a_verifier_needs_a_name_a_scheme_and_a_call(tree):
    model = target("llama")
    spec = Spec(model, random_head(model), tree, Own())
    as_undrafted(spec, [[5, 9, 11, 4]], 24)
    assert "own" in repr(spec)


@pytest.mark.parametrize(
    "name, members",
    {
        "suffix+eagle:HEAD": ["suffix", "eagle:HEAD"],
        "suffix:a/b,tokens=5000+hydra++:a+b": ["suffix:a/b,tokens=5000", "hydra++:a+b"],
        "suffix:c++/d+model:x+y": ["suffix:c++/d", "model:x+y"],
        "suffix:a+b": ["suffix:a+b"],
        "model:x+eagle:y": ["model:x+eagle:y"],
    }.items(),
)
def test_a_name_joins_a_memory_and_a_drafter(name, members):
    assert [member.own for member in DrafterSpec.parse(name).members] == members
