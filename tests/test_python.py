"""treespec from Python: what the package shows of itself, and models that are loaded already."""

import copy
from importlib.metadata import version
from inspect import signature

import pytest
import torch
import transformers as hf
from drafting import source_of
from equality import same_weights
from models import CONFIGS, random_head, random_model, target
from refusals import complains

import treespec
from treespec import load
from treespec.api.spec import Spec
from treespec.draft.models.skip import SkipProposer
from treespec.draft.models.skip_set import SkipSet
from treespec.draft.models.sparse import SparseProposer
from treespec.errors import InputError
from treespec.requests.options import Keywords

TEXT = "the user asks"


def test_the_package_knows_its_names():
    assert {"load", "Spec", "InputError", "__version__"} <= set(dir(treespec))
    assert treespec.__version__ == version("treespec")
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
    assert named == Keywords.__annotations__.keys()
    assert named > {"temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop"}


def test_a_spec_is_told_in_a_line(home):
    spec = load(home / "target", home / "head", "chain:3", "rrs-wo", dtype="float32")
    assert repr(spec) == "Spec(target, eagle head, static tree of 3 nodes, 3 deep, verifier rrs-wo, float32, cpu)"
    assert repr(spec.new()) == repr(spec)
    assert repr(spec.baseline()) == "Spec(target, no drafter, float32, cpu)"
    llama = target("llama")
    lookup = "Spec(LlamaForCausalLM, lookup, verifier auto, float32, cpu)"
    assert repr(Spec(llama, source_of("lookup", llama))) == lookup
    for source in (SkipProposer(llama, SkipSet(3, (1,), ())), SparseProposer(llama, 16), random_head(llama)):
        for tree in ("auto", "confident", "2x2"):
            assert "\n" not in repr(Spec(llama, source, tree, "topk" if tree != "confident" else "single"))


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
        "leave out one": {"head": "a", "drafter": "lookup"},
    }.items(),
)
def test_how_to_load_is_no_option_of_a_loaded_model(options, complaint):
    with complains(complaint):
        load(target("llama").model, **options)


@pytest.mark.parametrize("wrong", [None, 5, torch.nn.Linear(2, 2), {"target": "x"}])
def test_a_target_is_a_name_or_a_model(wrong):
    with complains(f"the target is a {type(wrong).__name__}: give a directory"):
        load(wrong)
