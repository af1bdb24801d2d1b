"""A text's own tokens are drafted beside the draft vocabulary, and change no text of the target."""

import itertools

import numpy as np
import pytest
import torch
from models import CONFIGS, TableConfig, TableModel, as_undrafted, draft_tree, randn, random_head, random_model, seeded
from reference import ERROR_PROBABILITY, TEXT_PROB_TOLERANCE, chi_square, enumerate_texts
from scipy.stats import chi2

from treespec.api.spec import Spec
from treespec.draft.auto.cost import CycleCost
from treespec.draft.forced import to_draft_ids
from treespec.draft.heads import own_tokens
from treespec.draft.heads.eagle import EagleProposer
from treespec.draft.heads.own_tokens import OWN_SHARE, find_first_vocabulary
from treespec.draft.postponed import Observation, join_observations
from treespec.draft.vocabulary import restrict
from treespec.kernels import ops as kernels
from treespec.kernels.checks import KernelInputError
from treespec.model.cpu.packed_layers import PackedLinear
from treespec.model.cpu.packing import pack
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams, compute_probs

pytestmark = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")
DRAFTED = torch.arange(10, 58, 3)
OUTSIDE = [token for token in range(64) if token not in DRAFTED]
RARE_TEXT = [0, 11, 5, 9, 13, 12, 62, 5, 10, 40]  # the vocabulary has 13, 10 and 40
TIMES = CycleCost((1, 8, 64), (1.0, 1.0, 1.2), 0.01)


@pytest.fixture(autouse=True)
def four_own_tokens(monkeypatch):
    monkeypatch.setattr(own_tokens, "OWN_SHARE", 4)


def build_pair(model, drafted):
    """A packed target, and a head that drafts these tokens with rows of the target's output layer."""
    target = Target(model.float())
    head = random_head(target)
    restrict(head, target, drafted)
    pack(target.model)
    pack(head)
    return target, head.eval()


@pytest.fixture(scope="module")
def pair():
    return build_pair(random_model(CONFIGS["llama"]()), DRAFTED)


def append_all(vocabulary, tokens):
    return vocabulary.append(np.array(tokens))


def list_own(vocabulary):
    return vocabulary.own.tolist()


def test_a_text_owns_its_latest_tokens_outside_of_the_vocabulary(pair):
    """At first the lowest tokens. 9 and 62 came once, 5 twice; 12, 9 and then 11 were seen least recently."""
    first = find_first_vocabulary(pair[1], pair[0])
    assert list_own(first) == OUTSIDE[:4] == [0, 1, 2, 3]
    text = append_all(first, RARE_TEXT)
    assert sorted(list_own(text)) == [5, 9, 12, 62]
    assert sorted(list_own(append_all(text, [13, 3, 8, 12]))) == [3, 5, 8, 12]
    assert text.tokens.tolist() == [*DRAFTED.tolist(), *list_own(text)]


def test_own_tokens_depend_on_the_text_and_not_on_its_calls(pair):
    """Nor on tokens that came and were taken back."""
    first = find_first_vocabulary(pair[1], pair[0])
    whole = append_all(first, RARE_TEXT)
    parts = first
    for token in RARE_TEXT:
        parts = append_all(parts, [token])
    holder = own_tokens.OwnTokens(first)
    holder.observe([torch.tensor([0, *RARE_TEXT[:4], 61, 60, 61, 2])])
    holder.rewind([4])
    holder.observe([torch.tensor([13, *RARE_TEXT[4:]])])
    for other in (parts, holder.texts[0]):
        assert list_own(other) == list_own(whole)
        assert other.length == whole.length == len(RARE_TEXT)
        assert torch.equal(kernels.unpack_weight(other.weight), kernels.unpack_weight(whole.weight))


def test_tokens_beyond_the_output_layer_are_nobodys(pair):
    """As those of pictures, which some models only read."""
    first = find_first_vocabulary(pair[1], pair[0])
    assert list_own(append_all(first, [64, 1000])) == list_own(first)


def test_a_small_vocabulary_gets_no_own_tokens(monkeypatch):
    """They stay a small share of what is scored."""
    monkeypatch.setattr(own_tokens, "OWN_SHARE", OWN_SHARE)
    target, head = build_pair(random_model(CONFIGS["llama"]()), torch.arange(31))
    assert find_first_vocabulary(head, target) is None


def observe_text(proposer, target, text):
    features = target.compute_features(torch.tensor([text[:-1]]))
    proposer.observe([features[0]], [torch.tensor(text)])


def test_a_head_that_rested_drafts_as_one_that_saw_every_cycle(pair):
    target, head = pair
    features = target.compute_features(torch.tensor([RARE_TEXT]))[0]
    tokens = torch.tensor([*RARE_TEXT, 5])
    cycles = []
    for start, end in itertools.pairwise([0, 4, 5, len(RARE_TEXT)]):
        cycles.append(Observation([features[start:end]], [tokens[start : end + 1]]))
    seeing = EagleProposer(head, target)
    for cycle in cycles:
        seeing.observe(*cycle)
    rested = EagleProposer(head, target)
    rested.observe(*join_observations(cycles))
    (expected,) = seeing.begin(tokens[-1:])
    (logits,) = rested.begin(tokens[-1:])
    assert torch.equal(logits, expected)
    assert torch.equal(rested.get_vocabulary(0), seeing.get_vocabulary(0))


@pytest.mark.parametrize("length", [9, 40])
def test_own_tokens_have_the_targets_logits(pair, length):
    """Those of a head that drafts all tokens. More than 32 pairs are read by the head's modules."""
    target, head = pair
    text = (RARE_TEXT * 5)[:length]
    proposer = EagleProposer(head, target)
    whole = EagleProposer(random_head(target), target)
    pack(whole.head)
    for each in (proposer, whole):
        observe_text(each, target, text)
    (logits,) = proposer.begin(torch.tensor(text[-1:]))
    (all_logits,) = whole.begin(torch.tensor(text[-1:]))
    vocabulary = proposer.get_vocabulary(0)
    assert sorted(vocabulary[len(DRAFTED) :].tolist()) == [5, 9, 12, 62] if length == 9 else True
    assert torch.equal(logits, all_logits[:, vocabulary])


def draft_of_text(pair, tree, verifier, params):
    target, head = pair
    drafter = Spec(target, head, tree, verifier).decoder.drafter.new()
    observe_text(drafter, target, RARE_TEXT)
    return draft_tree(drafter, torch.tensor(RARE_TEXT[-1:]), params, seeded(3))


@pytest.mark.parametrize("tree", ["20x1", "dynamic:depth=2,topk=20,nodes=60"])
def test_a_texts_own_tokens_can_be_drafted(pair, tree):
    """A tree of all draft tokens has the 16 of the vocabulary, the own 4, and no others."""
    drafted = draft_of_text(pair, tree, "topk", SamplingParams(0.0))
    assert set(drafted.tokens[drafted.depth == 1].tolist()) == {*DRAFTED.tolist(), 5, 9, 12, 62}


def test_sampled_drafts_have_the_probabilities_that_they_were_drawn_from(pair):
    """Own tokens included: by the chi-square test of 400 draws."""
    params = SamplingParams(1.0)
    drafted = draft_of_text(pair, "400x1", "rrs", params)
    observed = EagleProposer(pair[1], pair[0])
    observe_text(observed, pair[0], RARE_TEXT)
    (logits,) = observed.begin(torch.tensor(RARE_TEXT[-1:]))
    vocabulary = observed.get_vocabulary(0)
    q = torch.zeros(1, 64, dtype=torch.float32)
    q[:, vocabulary] = compute_probs(logits, params)
    assert torch.equal(drafted.drafts.q[:1], q)
    draws = drafted.drafts.draws.tokens[0]
    assert len(draws) == 400
    statistic, freedom = chi_square(draws.bincount(minlength=64).tolist(), q[0].tolist())
    assert freedom == 19
    assert statistic < chi2.isf(ERROR_PROBABILITY, freedom)


@pytest.mark.parametrize("verifier, tree", [("topk", "auto"), ("topk", "eagle"), ("rrs-wo", "levels:3x2x1")])
def test_greedy_texts_of_a_batch_are_each_the_targets(pair, verifier, tree):
    """Prompts of unlike tokens and lengths enter and leave at different times; two are samples of one prompt."""
    target, head = pair
    spec = Spec(target, head, tree, verifier, times=TIMES)
    prompts = [RARE_TEXT, [61, 60, 4], RARE_TEXT[:5] * 8, RARE_TEXT]
    outputs = as_undrafted(spec, prompts, 8)
    assert sum(sum(output.stats.drafted) for output in outputs) > 32


@pytest.mark.parametrize("verifier, tree", [("topk", "eagle"), ("rrs-wo", "2x2")])
def test_a_batch_drafts_each_text_as_alone(pair, verifier, tree):
    """Token for token, and with the same drafts."""
    spec = Spec(*pair, tree, verifier)
    prompts = [RARE_TEXT, [61, 60, 4], RARE_TEXT[:5] * 8]
    options = {"temperature": 1.0, "max_new_tokens": 5}
    batch = spec.generate(prompts, seed=[3, 4, 5], **options)
    for number, prompt in enumerate(prompts):
        alone = spec.generate(prompt, seed=3 + number, **options)
        assert alone.token_ids == batch[number].token_ids
        assert alone.stats.accepted == batch[number].stats.accepted


def test_a_turn_after_a_reused_prefix_drafts_as_a_new_text(pair):
    """The drafter of the first text is cut to the common prefix."""
    spec = Spec(*pair, "eagle", "topk")
    spec.generate([*RARE_TEXT, 61, 60, 4, 3], max_new_tokens=3)
    again = spec.generate([*RARE_TEXT, 8, 1], max_new_tokens=4)
    afresh = Spec(*pair, "eagle", "topk").generate([*RARE_TEXT, 8, 1], max_new_tokens=4)
    assert (again.token_ids, again.stats.accepted) == (afresh.token_ids, afresh.stats.accepted)


@pytest.mark.parametrize(
    "verifier, tree, way", [("topk", "2x2", "penalties"), ("rrs-wo", "2x2", "top-k"), ("traversal", "2x1", "top-k")]
)
def test_texts_with_own_tokens_have_the_targets_distribution(monkeypatch, verifier, tree, way):
    """By enumeration: two of four tokens are the vocabulary's, one is the text's."""
    monkeypatch.setattr(own_tokens, "OWN_SHARE", 2)
    target, head = build_pair(TableModel(TableConfig(4, seed=1)), torch.tensor([1, 3]))
    spec = Spec(target, head, tree, verifier)
    assert len(spec.decoder.drafter.proposer.get_vocabulary(0)) == 3
    error, _ = enumerate_texts(spec, way)
    assert error < TEXT_PROB_TOLERANCE


def test_forced_tokens_are_found_among_own_tokens():
    vocabulary = torch.tensor([10, 13, 16, 40, 2])
    cpu = torch.device("cpu")
    assert to_draft_ids([2, 16, 40], vocabulary, cpu).tolist() == [4, 2, 3]
    assert to_draft_ids([2, 17], vocabulary, cpu) is None


@pytest.mark.parametrize("form", range(6))
def test_outputs_of_a_packed_weight_are_copied_exactly(form):
    """In each form, between weights of unlike numbers of outputs."""
    weight = randn(40, 64, generator=seeded(1)).to(torch.bfloat16).float()
    source = PackedLinear(weight, None, form)
    copy = PackedLinear(torch.zeros(21, 64, dtype=torch.float32), None, form)
    outputs = np.array([39, 0, 17, 8, 1])
    places = np.array([0, 20, 8, 9, 3])
    target = kernels.allocate_weight(21, source.read_weight())
    assert target.numbers.shape == copy.read_weight().numbers.shape
    kernels.copy_outputs(source.read_weight(), target, outputs, places)
    copy.packed = torch.nn.Parameter(target.numbers, requires_grad=False)
    expected = torch.zeros(21, 64, dtype=torch.float32)
    expected[places] = source.weight.float()[outputs]
    if form < kernels.Q8_0:
        assert torch.equal(copy.weight.float(), expected)
    x = randn(3, 64, generator=seeded(2)).float()
    assert torch.equal(copy(x)[:, places], source(x)[:, outputs])
    with pytest.raises(KernelInputError):
        kernels.copy_outputs(source.read_weight(), target, np.array([40]), np.array([0]))
