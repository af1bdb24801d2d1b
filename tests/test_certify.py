"""A certificate: exact verifiers get it, and planted faults do not: each p-value is far below its error."""

import json
from dataclasses import replace
from functools import cache

import faults
import pytest
import torch
import transformers as hf
from commands import complains
from faults import draw_before_truncation, plan_at_low_temperature, plan_with_wrong_residual
from models import GROUPED, randn, random_head, random_model, seeded
from scipy.stats import kstest
from training import save_model
from transformers import GenerationConfig
from typer.testing import CliRunner

from treespec.api.spec import Spec
from treespec.cli import app
from treespec.draft.models.model import ModelProposer
from treespec.eval.certify.draws import DRAWS_QUESTION, POWER_QUESTION, REPEATS_QUESTION
from treespec.eval.certify.ranks import (
    BY_P,
    BY_RATIO,
    CYCLES_QUESTION,
    FIRST_TOKENS_QUESTION,
    RANK_QUESTION,
    TOKENS_QUESTION,
    iterate_sequence_ranks,
)
from treespec.eval.certify.run import Examination, certify
from treespec.eval.certify.samples import Sample, compare_greedy_output, generate_plain_outputs, list_ignored_settings
from treespec.eval.certify.statistics import find_least_gap
from treespec.eval.config import CertifyConfig
from treespec.kernels import ops as kernels
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams
from treespec.sampling.processors import Penalties
from treespec.text.templates import Stops

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]
CONFIG = CertifyConfig(target="target", head="head", tokens=400, length=24, top_k=5)
ONE_LAYER = {"vocab_size": 32, "num_hidden_layers": 1, "tie_word_embeddings": False, "eos_token_id": None}


@cache
def model(noise: float) -> Target:
    """A random Llama of 32 tokens; its output embedding has so much noise, as a share."""
    known = random_model(hf.LlamaConfig(**GROUPED | ONE_LAYER))
    weight = known.lm_head.weight.data
    weight += noise * 0.25 * randn(weight.shape, generator=seeded(1))
    return Target(known)


def tiny(tree: str, verifier: str) -> Spec:
    return Spec(model(0.0), ModelProposer(model(1.0), model(0.0)), tree, verifier)


SHORT = replace(CONFIG, tokens=48, length=6)


@pytest.fixture(scope="module")
def headed():
    """A random Llama with a head that knows nothing."""
    target = Target(random_model(hf.LlamaConfig(**GROUPED | {"tie_word_embeddings": False})))
    return Spec(target, random_head(target, seed=1), "3x2", "rrs-wo")


@pytest.mark.parametrize("tree, verifier", [("3x2", "rrs-wo"), ("chain:3", "block"), ("3x2", "topk")])
def test_exact_verifiers_are_certified(headed, tree, verifier):
    found = Examination(headed.configured(tree, verifier), PROMPTS, SHORT).decide_verdict()
    assert found["passed"], found["tests"]
    assert not found["equal_bits"]  # torch multiplies by the weights of a model object
    assert [test["samples"] > 0 for test in found["tests"][1:]] == [True] * (5 if verifier == "topk" else 9)
    assert sum(test["error"] for test in found["tests"][1:]) == pytest.approx(SHORT.error)


def test_a_wrong_greedy_answer_is_found(headed, monkeypatch):
    assert compare_greedy_output(headed, PROMPTS[0], 12)["explained"]
    monkeypatch.setattr(headed.target.model, "generate", lambda prompt, **_: torch.cat([prompt, prompt], dim=1))
    found = compare_greedy_output(headed, PROMPTS[0], 4)
    assert found["different_at"] == 0
    assert not found["explained"]  # in float32 rounding explains nothing


def test_what_the_models_own_config_adds_is_left_out_and_said(headed, monkeypatch):
    """A repetition penalty and suppressed tokens change generate's answer, but not the certificate."""
    first = headed.generate(PROMPTS[0], max_new_tokens=1).token_ids
    own = GenerationConfig(repetition_penalty=3.0, suppress_tokens=first, no_repeat_ngram_size=2, num_beams=2)
    monkeypatch.setattr(headed.target.model, "generation_config", own)
    model = headed.target.model
    prompt = torch.tensor([PROMPTS[0]])
    assert model.generate(prompt, max_new_tokens=1, pad_token_id=0)[0, -1].item() not in first
    assert all(compare_greedy_output(headed, prompt, 12)["different_at"] is None for prompt in PROMPTS)
    assert model.generation_config is own
    names = ["no_repeat_ngram_size", "num_beams", "repetition_penalty", "suppress_tokens"]
    assert sorted(list_ignored_settings(model)) == names
    monkeypatch.setattr(model, "generation_config", GenerationConfig(eos_token_id=2, temperature=0.6, do_sample=True))
    assert list_ignored_settings(model) == {}


def test_both_sides_end_at_a_templates_stops(tmp_path, monkeypatch):
    """The template's stop string is text that the plain model writes at once."""
    target = Target.load(str(save_model(tmp_path / "model")))
    spec = Spec(target, random_head(target, seed=1), "2x2", "rrs-wo")
    prompt = spec.encode("the user asks")
    whole = generate_plain_outputs(spec, prompt, 12, SamplingParams())[0]
    spec.template = "vicuna_v1.1"  # stops at </s>
    stop = target.tokenizer.decode(whole[3:4])
    ended = Spec(target, random_head(target, seed=1), "2x2", "rrs-wo", template="vicuna_v1.1")
    stops = Stops(strings=(stop,), token_ids=(whole[8],))
    monkeypatch.setattr("treespec.text.templates.get_stops", lambda template: stops)
    [theirs] = generate_plain_outputs(ended, prompt, 12, SamplingParams())
    assert len(theirs) < 12
    assert compare_greedy_output(ended, prompt, 12)["different_at"] is None


def test_the_ranks_are_those_of_the_text(headed):
    """The number of each token lies in its own interval of p, in the order of p, whatever stands after it."""
    params = SamplingParams(0.7)
    for prompt, output in ((PROMPTS[0], [3, 8, 1]), ([5], [3, 8, 1]), ([5], [7])):
        [found] = iterate_sequence_ranks(headed, [Sample(params, prompt, output)])
        distributions = (headed.target.model(torch.tensor([prompt + output])).logits[0].double() / 0.7).softmax(-1)
        assert [len(found[name]) for name in (BY_RATIO, BY_P, RANK_QUESTION)] == [len(output)] * 3
        by_number = torch.cat([found[TOKENS_QUESTION][:1, 0], found[TOKENS_QUESTION][:, 1]])
        for i, token in enumerate(output):
            distribution = distributions[len(prompt) - 1 + i]
            below = distribution[distribution < distribution[token]].sum()
            assert below - 1e-5 <= found[BY_P][i] <= below + distribution[token] + 1e-5
        for token, distribution, number in zip(output, distributions[len(prompt) - 1 :], by_number, strict=False):
            assert distribution[:token].sum() - 1e-5 <= number <= distribution[: token + 1].sum() + 1e-5


def test_the_command_gives_a_report_and_exit_code_0(home, tmp_path):
    options = f"--target {home}/target --head {home}/head --out {tmp_path}/report.json --limit 2 --tokens 40 --length 8"
    command = ["certify", *options.split(), "--verifier", "rrs-wo", "--tree", "2x2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert len(report["tests"]) == 10
    assert f"would show shifts of more than {report['tests'][1]['finds']:.1%}" in " ".join(done.output.split())
    assert report["equal_bits"] == ("a node of a tree has the same bits as one token at a time" in done.output)
    assert report["equal_bits"] == bool(kernels.load_kernels())


def test_a_file_that_cannot_be_written_is_said_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    with complains("cannot write"):
        certify(CertifyConfig(target="no-model", head="no-head", out=f"{tmp_path}/file/report.json"))


SHAPED = replace(CONFIG, tokens=120, length=12, repetition_penalty=1.3, frequency_penalty=0.4)


def test_answers_by_penalties_and_biases_are_certified():
    biased = replace(SHAPED, logit_bias={3: 1.5, 4: float("-inf")})
    found = Examination(tiny("3x2", "rrs-wo"), PROMPTS, biased).decide_verdict()
    assert found["passed"], found["tests"]


def test_greedy_answers_that_leave_out_a_path_are_found(monkeypatch):
    """Penalties that count the committed answer alone, not the node's own path, give other answers."""
    exact = Penalties.process_logits

    def of_the_answer(self, answer, paths, logits):
        return exact(self, answer, [()] * len(paths) if answer else paths, logits)

    monkeypatch.setattr(Penalties, "process_logits", of_the_answer)
    found = Examination(tiny("3x2", "rrs-wo"), PROMPTS, SHAPED).decide_verdict()
    assert not found["passed"]


TESTS = 10  # of samples, at most
BATCH = 32  # half of the samples are drawn in batches, which is quicker


def p_values(spec, tokens, seed=0):
    """By question; plain texts are not compared."""
    examined = Examination(spec, PROMPTS, replace(CONFIG, tokens=tokens, seed=seed, batch=BATCH))
    return {test["test"]: test["p_value"] for test in examined.judge([], examined.sample(), [])["tests"][1:]}


@pytest.mark.parametrize(
    "tree, verifier, tokens, plant, question",
    [
        ("64x1", "rrs", 200, faults.draws_from_a_hotter_distribution, POWER_QUESTION),
        ("4x2", "optimal", 96, faults.drops_draws_without_nodes, REPEATS_QUESTION),
        ("chain:1", "single", 1000, faults.reuses_uniform_numbers, FIRST_TOKENS_QUESTION),
        ("chain:3", "single", 120, faults.seeds_every_cycle_alike, CYCLES_QUESTION),
        (
            "chain:1",
            "single",
            400,
            lambda spec: faults.plant_scheme(spec, planning=plan_with_wrong_residual),
            FIRST_TOKENS_QUESTION,
        ),
        ("8x1", "rrs-wo", 100, lambda spec: faults.plant_scheme(spec, drawing=draw_before_truncation), DRAWS_QUESTION),
        ("chain:1", "single", 300, lambda spec: faults.plant_scheme(spec, planning=plan_at_low_temperature), BY_RATIO),
    ],
    ids=["hotter draws", "lost draws", "uniforms reused", "seeded again", "residual", "before top-p", "temperature"],
)
def test_planted_faults_are_found(tree, verifier, tokens, plant, question):
    spec = tiny(tree, verifier)
    plant(spec)
    found = p_values(spec, tokens)
    assert found[question] < CONFIG.error / TESTS, found


def test_a_fault_of_the_named_size_is_found_and_a_fifth_not():
    """More of the most likely token. A share of this fault makes a share of its gap."""

    def tested(share, tokens):
        def plan(scheme, p, q, draws):
            top = torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1.0)
            return (1 - share) * type(scheme).plan(scheme, p, q, draws) + share * top

        spec = tiny("chain:1", "single")
        faults.plant_scheme(spec, planning=plan)
        texts = Examination(spec, PROMPTS, replace(CONFIG, tokens=tokens, batch=BATCH)).sample()
        return torch.cat([place[BY_P] for place in iterate_sequence_ranks(spec, texts)]).numpy()

    size = find_least_gap(300, CONFIG.error / TESTS) / kstest(tested(1.0, 300), "uniform").statistic
    assert size < 1
    assert kstest(tested(size, 300), "uniform").pvalue < CONFIG.error / TESTS
    assert kstest(tested(size / 5, 300), "uniform").pvalue > CONFIG.error / TESTS
