"""treespec from Python: what the package shows, models that are loaded already, and drafters of one's own."""

import copy
from inspect import signature

import pytest
import torch
import transformers as hf
from commands import complains
from drafters import source_of
from models import CONFIGS, as_undrafted, random_head, random_model, same_weights, target

import treespec
from treespec import load
from treespec.api.spec import Spec
from treespec.draft.drafter import Drafter, PerText
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.one_hot import TextDrafter
from treespec.draft.source import as_source
from treespec.draft.spec import DrafterSpec
from treespec.engine.options import RequestKeywords
from treespec.errors import InputError
from treespec.files.distribution import find_version
from treespec.trees.tree import build_root_tree
from treespec.verify.topk import TopK
from treespec.verify.walk import Walk

TEXT = "the user asks"


def test_the_package_knows_its_names():
    assert {"load", "Spec", "InputError", "__version__"} <= set(dir(treespec))
    assert treespec.__version__ == find_version()
    assert treespec.Spec is Spec
    assert treespec.InputError is InputError
    assert all(hasattr(treespec, name) for name in dir(treespec))
    wrong = "spek"
    with pytest.raises(AttributeError, match="no attribute 'spek'"):
        getattr(treespec, wrong)


@pytest.mark.parametrize("name", ["generate", "stream", "request"])
def test_options_are_typed_by_name(name):
    options = signature(getattr(Spec, name)).parameters["options"].annotation
    named = options.__args__[0].__annotations__.keys()
    assert named == RequestKeywords.__annotations__.keys()
    assert named > {"temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop"}


def test_a_spec_is_told_in_a_line(home):
    spec = load(home / "target", home / "head", "chain:3", "rrs-wo", dtype="float32")
    assert repr(spec) == "Spec(target, eagle head, static tree of 3 nodes, 3 deep, verifier rrs-wo, float32, cpu)"
    assert repr(spec.new()) == repr(spec)
    assert repr(spec.baseline()) == "Spec(target, no drafter, float32, cpu)"
    llama = target("llama")
    suffix = "Spec(LlamaForCausalLM, suffix, verifier auto, float32, cpu)"
    assert repr(Spec(llama, source_of("suffix", llama))) == suffix
    for tree in ("auto", "2x2"):
        assert "\n" not in repr(Spec(llama, random_head(llama), tree, "topk"))


def test_a_new_spec_is_the_same_and_shares_no_text(home):
    spec = load(home / "target", home / "head", "2x2", "rrs-wo", dtype="float32")
    other = spec.new()
    assert (other.target, other.source, other.policy, other.verifier) == (
        spec.target,
        spec.source,
        spec.policy,
        spec.verifier,
    )
    assert other.decoder.cache is not spec.decoder.cache
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": 8}
    assert other.generate(TEXT, **options).token_ids == spec.generate(TEXT, **options).token_ids
    lossy = Spec(spec.target, spec.source, "2x2", "typical", allow_lossy=True)
    assert lossy.new().verifier.name == "typical"


def test_a_model_that_is_loaded_already_answers_as_its_directory(home):
    wanted = load(home / "target", home / "head", "2x2", dtype="float32").generate(TEXT, max_new_tokens=12)
    model = hf.AutoModelForCausalLM.from_pretrained(home / "target", dtype=torch.float32)
    words = hf.AutoTokenizer.from_pretrained(home / "target")
    spec = load(model, home / "head", "2x2", tokenizer=words)
    assert spec.target.model is model
    assert spec.generate(TEXT, max_new_tokens=12).text == wanted.text
    ids = torch.tensor([words.encode(TEXT)])
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert plain == wanted.token_ids
    unworded = load(model)
    assert unworded.generate(ids, max_new_tokens=12)[0].token_ids == wanted.token_ids
    with complains("no tokenizer"):
        unworded.generate(TEXT)


def test_the_weights_of_a_model_that_others_hold_stay_as_they_are():
    model = random_model(CONFIGS["llama"]()).to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    load(model).generate([5, 9], max_new_tokens=4)
    assert [type(module) for module in model.modules()] == kinds
    assert same_weights(model.state_dict(), before)
    assert copy.deepcopy(model)


@pytest.mark.parametrize(
    "complaint, options",
    {
        "dtype is float32, but the target is loaded already": {"dtype": "float32"},
        "device_map is cpu": {"device_map": "cpu"},
        "max_memory is": {"max_memory": {0: "1GiB"}},
        "load_in is int8, but the target is loaded already": {"load_in": "int8"},
    }.items(),
)
def test_how_to_load_is_no_option_of_a_loaded_model(options, complaint):
    with complains(complaint):
        load(target("llama").model, **options)


@pytest.mark.parametrize("wrong", [None, 5, torch.nn.Linear(2, 2), {"target": "x"}])
def test_a_target_is_a_name_or_a_model(wrong):
    with complains(f"the target is a {type(wrong).__name__}: give a directory"):
        load(wrong)


class NoDrafts(Drafter):
    """A drafter as a user would write one: it counts the texts' positions and drafts nothing."""

    per_text = ("counts",)

    def __init__(self):
        self.counts = [0]

    def draft_trees(self, roots, distributions, generators, cache, now=None):
        assert self.counts == cache.lengths
        return [build_root_tree(root) for root in roots.split(1)]

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
    source = as_source(head, model)
    assert (source.name, source.head, list(source.models)) == ("eagle head", head, [head])
    assert as_source(source, model) is source
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    answers = [
        Spec(model, drafting, "2x2", "rrs").generate([5, 9, 7], **options) for drafting in (head, proposer, source)
    ]
    assert len({tuple(answer.token_ids) for answer in answers}) == 1
    assert len({tuple(answer.stats.accepted) for answer in answers}) == 1


def test_a_drafter_of_given_tokens_is_a_source_too():
    model = target("llama")
    suffix = source_of("suffix", model)
    assert (suffix.name, suffix.proposer, list(suffix.models)) == ("suffix", None, [])


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_drafter_of_ones_own_serves_texts_that_enter_and_leave(batch):
    """Its positions of each text are the cache's at every cycle, or it stops."""
    model = target("llama")
    texts = [[5, 9, 7], [4], [8, 3, 11, 30], [21, 6]]
    spec = Spec(model, NoDrafts())
    as_undrafted(spec, texts, 10, batch=batch)
    assert "nodrafts" in repr(spec)


class CountsInStates(NoDrafts):
    """`NoDrafts` with an object for each text in `states`."""

    per_text = ()
    counts = property(lambda self: [state["positions"] for state in self.states])

    def __init__(self):
        self.states = [{"positions": 0}]

    def observe(self, features, tokens):
        for state, new in zip(self.states, tokens, strict=True):
            state["positions"] += len(new) - 1

    def rewind(self, lengths):
        self.states = [{"positions": length} for length in lengths]

    def new(self):
        return CountsInStates()


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_the_states_of_a_drafter_follow_the_texts_that_enter_and_leave(batch):
    model = target("llama")
    texts = [[5, 9, 7], [4], [8, 3, 11, 30], [21, 6]]
    as_undrafted(Spec(model, CountsInStates()), texts, 10, batch=batch)


class Learns(TextDrafter):
    """Drafts the last token again. Fails if the text does not begin with the one that it saw before."""

    def __init__(self, store):
        self.store = store
        self.seen = []

    def draft(self, text):
        assert self.seen == text[: len(self.seen)].tolist()  # each text has a drafter of its own
        self.seen = text.tolist()
        return Guess.chain([int(text[-1])])


class SharesStore(Learns):
    def new(self):
        return SharesStore(self.store)


@pytest.mark.parametrize("shared", [False, True])
def test_each_text_gets_a_drafter_of_its_own_which_shares_what_new_gives_it(shared):
    model = target("llama")
    store = {}
    spec = Spec(model, SharesStore(store) if shared else Learns(store), verifier="topk")
    as_undrafted(spec, [[5, 9, 7], [4], [8, 3, 11, 30]], 10, batch=2)
    assert all((state.drafter.store is store) == shared for state in spec.decoder.drafter.states)


class Rows(PerText):
    per_text = ("numbers", "inner")

    def __init__(self, *numbers, inner=None):
        self.numbers = list(numbers)
        self.inner = inner


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

    name = "own"
    scheme = TopK()
    coupled = False

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


@pytest.mark.parametrize("prompts, n, answers", [([5, 6], 2, 2), ([[5], [6]], None, 2), ([[5], [6], [7]], 4, 12)])
def test_seeds_out_of_range_are_refused_by_the_given_one(prompts, n, answers):
    spec = Spec(target("llama"), None)
    last = 2**64 - answers
    outputs = spec.generate(prompts, n=n, seed=last, temperature=1.0, max_new_tokens=1)
    assert len(outputs) == (n if answers == n else len(prompts))
    with complains(
        rf"seed is {last + 1}, and {answers} answers take it and the next ones: .* at most 2\^64 - {answers}$"
    ):
        spec.generate(prompts, n=n, seed=last + 1, max_new_tokens=1)
    with complains(r"^seed is 18446744073709551616, must lie in \[0, 2\^64\)$"):
        spec.generate([5, 6], seed=2**64, max_new_tokens=1)
