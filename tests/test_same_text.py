"""One seed, one text: neither drafts nor trees nor neighbours change a token, greedy or sampled."""

import hashlib
import json
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import faults
import pytest
import torch
from drafters import DRAFTERS, PROMPT, TABLE_VOCAB, habits, near, spec_of
from models import CONFIGS, random_head, random_model, random_prompts, target
from reference import ERROR_PROBABILITY, chi_square, text_probs
from scipy.stats import chi2

from treespec.api.engine import Engine
from treespec.api.load import load
from treespec.api.spec import Spec
from treespec.draft.models.model import ModelProposer, OtherVocabulary
from treespec.draft.models.other_vocabulary import SharedVocabulary
from treespec.draft.tree_drafter import TreeDrafter
from treespec.kernels import ops as kernels
from treespec.model.cpu.packing import pack
from treespec.model.target import Target
from treespec.sampling.noise import Noise, sample_gumbel, to_int64
from treespec.sampling.probs import SamplingParams
from treespec.sampling.sampler import Sampler

SHARED = Path(__file__).parents[2] / "shared" / "data"
WAYS = {"plain": {}, "cut": {"top_k": 3, "top_p": 0.9, "min_p": 0.05}, "habits": {"logits_processor": habits}}
packed = pytest.mark.skipif(kernels.load_kernels() is None, reason="no C compiler")


TREES = ("auto:depth=3,topk=3", "2x2", "dynamic:depth=3,topk=2,nodes=5", "chain")
FIXED_TREES = TREES[1::2]
GROWN_TREES = TREES[::2]
BY_TURN = [(drafter, "cut", (FIXED_TREES, GROWN_TREES)[number % 2]) for number, drafter in enumerate(DRAFTERS)]
OTHERS = [(drafter, "cut", (GROWN_TREES, FIXED_TREES)[number % 2]) for number, drafter in enumerate(DRAFTERS)]


@pytest.mark.parametrize(
    "drafter, way, trees",
    [
        *BY_TURN,
        *product(("model", "eagle, half the tokens", "medusa", "suffix+eagle"), ("plain", "habits"), [TREES]),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS),
    ],
)
def test_no_drafter_changes_the_text_of_a_seed(drafter, way, trees):
    """Fixed and grown trees; by turns, where an answer is cut."""
    new = 30 if way == "plain" else 18  # a fault of the noise of deep drafts, which are rare, shows in the longer ones
    options = {"max_new_tokens": new, "temperature": 0.9, "seed": 7, "memory": "texts"} | WAYS[way]
    deepest = 4 if drafter.startswith(("medusa", "hydra")) else 6
    model_free = drafter in ("none", "suffix", "rest", "jacobi", "lookahead")
    wanted = spec_of(drafter, None, "auto").baseline().generate(PROMPT, **options).token_ids
    for tree in (None,) if model_free else trees:
        if tree == "chain":
            tree = f"chain:{deepest}"
        assert spec_of(drafter, tree, "auto").generate(PROMPT, **options).token_ids == wanted


def test_texts_of_many_seeds_have_the_targets_distribution():
    """Two tokens of 4, each text by a seed of its own."""
    spec = spec_of("model", "2x2", "gumbel")
    runs = 1200
    outputs = spec.generate([PROMPT] * runs, temperature=0.8, max_new_tokens=2, seed=list(range(runs)), batch=400)
    found = Counter(tuple(output.token_ids) for output in outputs)
    wanted = text_probs(spec.target, PROMPT, 2, SamplingParams(temperature=0.8))
    statistic, freedom = chi_square([found[text] for text in wanted], list(wanted.values()))
    assert freedom > 8
    assert statistic < chi2.isf(ERROR_PROBABILITY, freedom)


def test_a_draft_model_that_is_the_target_drafts_what_is_output():
    """The noise of a node is that of its position, for target and draft alike."""
    model = near(2)
    spec = Spec(model, ModelProposer(model, model), "chain:6", "gumbel")
    stats = spec.generate(PROMPT, temperature=1.3, top_p=0.95, max_new_tokens=77, seed=1).stats
    assert stats.accepted == [6] * 11


HELD = torch.tensor([1, 3])


def half_drafted():
    """The target as its own draft model, which drafts only the tokens HELD."""
    model = near(2)
    names = {token: bytes([97 + token]) for token in range(TABLE_VOCAB)}
    words = SharedVocabulary(HELD, HELD, names, {name: token for token, name in names.items()})
    return Spec(model, OtherVocabulary(model, model, words), "chain:3", "gumbel")


def test_the_noise_of_all_levels_is_that_of_the_drafted_tokens():
    """An accelerator makes it at once, before a tree grows."""
    noises = [Noise(seed, TABLE_VOCAB, torch.device("cpu")) for seed in (5, 6)]
    levels = half_drafted().decoder.drafter._get_noise(noises)
    assert levels.shape == (2, 3, 2)
    for noise, own in zip(noises, levels, strict=True):
        assert torch.equal(own, torch.stack([noise.get_level(depth)[HELD] for depth in range(3)]))


def test_half_the_vocabulary_drafts_each_output_that_it_holds():
    """The draft model is the target, so a draft is refused where the output is none of its tokens, and only there."""
    spec = half_drafted()
    output = spec.generate(PROMPT, temperature=1.3, max_new_tokens=80, seed=1)
    ids = list(output.token_ids)
    held = set(HELD.tolist())
    lengths = output.stats.accepted[:-1]  # the last cycle ends with the answer
    assert len({*lengths}) > 2
    for accepted in lengths:
        cycle = ids[: accepted + 1]
        ids = ids[accepted + 1 :]
        assert {*cycle[:accepted]} <= held
        assert accepted == 3 or cycle[-1] not in held


def seed_of_noise(seed, prompt):
    """The number that the noise of a completion starts from, by the definition in docs/verification.md."""
    words = b"".join(number.to_bytes(8, "little") for number in (seed, *prompt))
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def gumbel_number(seed, position, token):
    """Minus the logarithm of minus that of a uniform number of 53 bits, by SplitMix64."""
    state = seed + position * 0xD1342543DE82EF95 + (token + 1) * 0x9E3779B97F4A7C15
    state %= 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    state ^= state >> 31
    return -math.log(-math.log((min(state >> 11, 2**53 - 2) + 0.5) / 2**53))


def text_by_definition(target, prompt, seed, temperature, new):
    """Whole forwards of transformers' model, no cache, no tree: the largest log-probability plus noise each time."""
    start = seed_of_noise(seed, prompt)
    ids = list(prompt)
    for position in range(new):
        with torch.no_grad():
            logits = target.model(torch.tensor([ids])).logits[0, -1]
        scores = (logits.double() / temperature).log_softmax(-1).tolist()
        noisy = [score + gumbel_number(start, position, token) for token, score in enumerate(scores)]
        ids.append(noisy.index(max(noisy)))
    return ids[len(prompt) :]


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_the_text_of_a_seed_is_that_of_its_definition(seed):
    """With drafts of depth six that are all accepted, so the noise of every depth counts."""
    decoded = target("llama")
    options = {"temperature": 0.9, "seed": seed, "ignore_eos": True}
    spec = Spec(decoded, ModelProposer(decoded, decoded), "chain:6", "gumbel")
    output = spec.generate(PROMPT, max_new_tokens=28, **options)
    assert output.stats.accepted == [6] * 4
    assert output.token_ids == text_by_definition(decoded, PROMPT, seed, 0.9, 28)


@pytest.mark.parametrize(
    "find",
    [
        partial(test_the_text_of_a_seed_is_that_of_its_definition, 7),
        partial(test_no_drafter_changes_the_text_of_a_seed, "model", "plain", TREES),
    ],
    ids=["by definition", "by baseline"],
)
def test_one_noise_for_all_depths_beyond_3_is_found(monkeypatch, find):
    faults.plant(monkeypatch, Noise, Noise.get_start, faults.start_one_of_three_levels)
    with pytest.raises(AssertionError):
        find()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_noise_of_the_first_tokens_for_half_a_vocabulary_is_found(monkeypatch, has_kernels):
    if has_kernels and kernels.load_kernels() is None:
        pytest.skip("no C compiler")
    if has_kernels:
        fault = faults.compute_noise_of_the_first_tokens
        faults.plant(monkeypatch, Noise, Noise.compute_for_tokens, fault)
    else:
        monkeypatch.setattr("treespec.draft.cycle.can_score_by_kernel", lambda *_: False)
        faults.plant(monkeypatch, Sampler, Sampler.score_tokens, faults.score_as_the_first_tokens)
    with pytest.raises(AssertionError):
        test_half_the_vocabulary_drafts_each_output_that_it_holds()


def test_noise_of_the_first_tokens_on_an_accelerator_is_found(monkeypatch):
    faults.plant(monkeypatch, TreeDrafter, TreeDrafter._get_noise, faults.draw_noise_of_the_first_tokens)
    with pytest.raises(AssertionError):
        test_the_noise_of_all_levels_is_that_of_the_drafted_tokens()


def test_noise_is_splitmix_and_its_tail_that_of_the_distribution():
    """The first numbers of SplitMix64 from 1234567 are those of its published test."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    uniform = (-sample_gumbel([1234567], 3, device=torch.device("cpu"))[0].double()).exp().neg().exp()
    assert uniform.tolist() == pytest.approx([number / 2**64 for number in published], rel=1e-5)
    assert to_int64(2**63) == -(2**63)
    many = sample_gumbel([5], 2_000_000, device=torch.device("cpu"))[0].double()
    for bound in (-2.0, 0.0, 5.0, 10.0):
        above = -math.expm1(-math.exp(-bound))
        error = 5 * math.sqrt(above * (1 - above) / len(many))
        assert float((many > bound).double().mean()) == pytest.approx(above, abs=error)


def start_of(bits):
    """The start of a stream whose first number has these upper 53 bits: SplitMix64, backwards."""
    state = bits << 11
    state ^= state >> 31 ^ state >> 62
    state = state * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    state ^= state >> 27 ^ state >> 54
    state = state * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    state ^= state >> 30 ^ state >> 60
    return to_int64((state - 0x9E3779B97F4A7C15) % 2**64)


EDGES = [start_of(bits) for bits in (0, 1, 2**53 - 2, 2**53 - 1)]


def test_the_noise_of_every_uniform_number_is_finite():
    """The largest, 2^53 - 1, and a half would round to 1, whose noise is infinite."""
    lowest, low, high, highest = sample_gumbel(EDGES, 1, device=torch.device("cpu")).flatten().tolist()
    assert lowest == pytest.approx(-math.log(54 * math.log(2)), rel=1e-6)
    assert low == pytest.approx(-math.log(math.log(2**54 / 3)), rel=1e-6)
    assert high == highest == pytest.approx(52 * math.log(2), rel=1e-6)  # doubles below 1 lie 2^-53 apart


@packed
def test_noise_of_the_kernels_is_that_of_torch():
    """To the rounding of logarithms, at sizes within a block and across several, and at both ends."""
    for size in (1, 7, 1024, 3000, 200_000):
        starts = [0, 5, -(2**63) + 7, *EDGES]
        expected = sample_gumbel(starts, size, device=torch.device("cpu"))
        torch.testing.assert_close(kernels.fill_noise(starts, size), expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def half():
    """A packed Llama in bfloat16 with a random head."""
    config = CONFIGS["llama"]()
    config.intermediate_size = 64
    model = random_model(config).bfloat16()
    pack(model)
    decoded = Target(model)
    return Spec(decoded, random_head(decoded).bfloat16(), "dynamic:depth=3,topk=3,nodes=9")


@packed
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_neighbours_and_what_was_said_before_change_no_token(half, temperature):
    """A batch of eight against each alone; then each goes on behind its own completion."""
    options = {"temperature": temperature, "max_new_tokens": 16, "ignore_eos": True}
    prompts = random_prompts(8)
    plain = half.baseline()
    outputs = half.generate(prompts, seed=5, batch=8, **options)
    alone = [plain.generate(prompt, seed=5 + i, **options) for i, prompt in enumerate(prompts)]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    longer = [[*prompt, *output.token_ids, 7] for prompt, output in zip(prompts, outputs, strict=True)]
    for prompt, more in zip(prompts[:3], longer, strict=False):
        half.generate(prompt, seed=5, **options)
        resumed = half.generate(more, seed=9, **options)
        fresh = plain.new().generate(more, seed=9, **options)
        assert resumed.stats.cached_tokens > 0
        assert resumed.token_ids == fresh.token_ids


@packed
def test_clients_of_one_server_get_the_text_of_their_seed(half):
    prompts = random_prompts(16)
    options = [{"temperature": 0.9 * (i % 2), "max_new_tokens": 16, "seed": i} for i in range(16)]
    wanted = [half.baseline().generate(*one, **own).token_ids for *one, own in zip(prompts, options, strict=True)]
    with Engine(half, batch=4) as engine, ThreadPoolExecutor(4) as clients:
        asked = clients.map(lambda i: engine.submit(prompts[i], **options[i]).result().token_ids, range(16))
        assert list(asked) == wanted


@packed
@pytest.mark.parametrize(
    "model, questions, new", [("bench-target", 20, 16), pytest.param("demo", 160, 40, marks=pytest.mark.slow)]
)
def test_completions_of_mt_bench_in_bfloat16_are_those_without_drafts(model, questions, new):
    """Both turns, the second behind a fixed first answer, greedy and by a seed."""
    folder = SHARED / model if model != "demo" else model
    if not (SHARED / "mt_bench").exists():
        pytest.skip("the shared data are absent")
    rows = [json.loads(line)["turns"] for line in (SHARED / "mt_bench" / "question.jsonl").read_text().splitlines()]
    said = {"role": "assistant", "content": "Of course."}
    chats = [[{"role": "user", "content": first}] for first, _ in rows]
    chats += [[*chat, said, {"role": "user", "content": second}] for chat, (_, second) in zip(chats, rows, strict=True)]
    spec = load(
        str(folder), dtype="bfloat16", **({"head": "demo"} if model == "demo" else {"drafter": "suffix:tokens=0"})
    )
    plain = spec.baseline()
    for number, chat in enumerate(sorted(chats, key=lambda chat: len(str(chat)))[:questions]):
        options = {"max_new_tokens": new, "temperature": float(number % 2), "seed": number}
        assert spec.generate(chat, **options).token_ids == plain.generate(chat, **options).token_ids, number
