"""A certificate: exact verifiers get it, planted faults do not, and greedy answers that differ are found."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from models import GROUPED, random_head, random_model, save_model
from scipy.stats import kstest

from treespec.errors import InputError
from treespec.eval.certify import certify, detectable, examine, greedy_answer, judge, laws_along, placed, sampled
from treespec.eval.certify_config import CertifyConfig
from treespec.spec import Spec
from treespec.target import Target
from treespec.trees.tree import Draws
from treespec.verify.rrs import RRS
from treespec.verify.rrs_wo import RRSWithoutReplacement
from treespec.verify.walk import Walk

PROMPTS = [[1, 2, 3, 4], [5, 6, 7]]
SHARP = 2.5
CONFIG = CertifyConfig("", "", tokens=2000, length=6, greedy_tokens=12)


@pytest.fixture(scope="module")
def spec():
    """A random Llama of 9 tokens with sharp laws, and a head that knows nothing."""
    model = random_model(hf.LlamaConfig(**GROUPED | {"vocab_size": 9, "tie_word_embeddings": False}))
    with torch.no_grad():
        model.lm_head.weight.mul_(SHARP)
    target = Target(model)
    return Spec(target, random_head(target, seed=1), "3x2", "rrs-wo")


@pytest.fixture(scope="module")
def plain(spec):
    baseline = spec.baseline()
    return [row for i, prompt in enumerate(PROMPTS) for row in sampled(spec, baseline, prompt, 2, CONFIG, seed=100 + i)]


def verdict(spec, plain, seed=1):
    ours = [row for i, prompt in enumerate(PROMPTS) for row in sampled(spec, spec, prompt, 2, CONFIG, seed=seed + i)]
    return judge(spec, [greedy_answer(spec, prompt, 12) for prompt in PROMPTS], ours, plain, CONFIG)


@dataclass(frozen=True)
class Planted:
    """A scheme with a fault. name: of the fault."""

    name: str
    scheme: Any
    deterministic: bool = False
    lossless: bool = True
    max_draws: int | None = None

    def draw(self, q, k, generator):
        if self.name == "q taken before top-p":
            q = q * (q >= q.topk(3).values[..., -1:])
        draws = self.scheme.draw(q, k, generator)
        if self.name == "pruned by the q of what was drawn":
            kept = q.gather(1, draws.tokens.clamp(min=0)).topk(min(2, draws.tokens.shape[1])).indices.sort().values
            lost = torch.ones_like(draws.tokens).scatter_(1, kept, 0)
            return Draws(draws.tokens.masked_fill(lost > 0, -1))
        return draws

    def plan(self, p, q, draws):
        if self.name == "residual with the wrong q":
            first = draws.tokens[:, :1].clamp(min=0)
            accepted = (p.gather(1, first) / q.gather(1, first)).clamp(max=1)
            return (p * (1 - accepted)).scatter_add_(1, first, accepted)
        if self.name == "repeats dropped":
            repeats = (draws.tokens[:, :, None] == draws.tokens[:, None]).tril(-1).any(-1)
            return self.scheme.plan(p, q, Draws(draws.tokens.masked_fill(repeats, -1)))
        if self.name == "temperature forgotten":
            return (p**0.5) / (p**0.5).sum(-1, keepdim=True)
        return self.scheme.plan(p, q, draws)

    def acceptance_rate(self, p, q, k):
        return None


@pytest.mark.parametrize(("tree", "verifier"), [("3x2", "rrs-wo"), ("3x2", "traversal"), ("chain:3", "block")])
def test_exact_verifiers_are_certified(spec, plain, tree, verifier):
    found = verdict(spec.configured(tree, verifier), plain)
    assert found["passed"], found["tests"]


@pytest.mark.parametrize(
    ("fault", "scheme"),
    [
        ("residual with the wrong q", RRSWithoutReplacement()),
        ("q taken before top-p", RRSWithoutReplacement()),
        ("pruned by the q of what was drawn", RRSWithoutReplacement()),
        ("temperature forgotten", RRSWithoutReplacement()),
        ("repeats dropped", RRS()),
    ],
)
def test_planted_faults_are_found(spec, plain, fault, scheme):
    found = verdict(spec.configured("8x2", Walk(Planted(fault, scheme))), plain)
    assert not found["passed"]


def test_a_wrong_greedy_answer_is_found(spec, monkeypatch):
    assert greedy_answer(spec, PROMPTS[0], 12)["explained"]
    monkeypatch.setattr(spec.target.model, "generate", lambda prompt, **_: torch.cat([prompt, prompt], dim=1))
    found = greedy_answer(spec, PROMPTS[0], 4)
    assert found["different_at"] == 0
    assert not found["explained"]  # in float32 rounding explains nothing


def test_numbers_of_true_samples_are_uniform():
    generator = torch.Generator().manual_seed(0)
    law = torch.randn(7, generator=generator).softmax(-1)
    chosen = law.multinomial(20_000, replacement=True, generator=generator)[:, None]
    coin = torch.rand(20_000, 1, generator=generator, dtype=torch.float64)
    order = torch.tensor([3.0, 1, 1, 5, 0, 2, 2])  # ties share one place
    numbers = placed(law.expand(20_000, -1), order.expand(20_000, -1), chosen, coin)
    assert kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4


def test_the_stated_power_is_there():
    """A shift of `detectable` is found 99 times in 100 or more: by shifted uniform numbers, 300 times."""
    n, error = 400, 1e-3
    shift, generator = detectable(n, error, 1), torch.Generator().manual_seed(1)
    found = 0
    for _ in range(300):
        numbers = torch.rand(n, generator=generator).double()
        numbers = torch.where(torch.rand(n, generator=generator) < shift, numbers * 1e-3, numbers)
        found += kstest(numbers.numpy(), "uniform").pvalue < error
    assert found >= 290


def test_the_laws_are_those_of_the_text(spec):
    """The number of each token lies in its own interval of p, in the order of p, whatever stands after it."""
    prompt, output = PROMPTS[0], [3, 8, 1]
    [numbers] = laws_along(spec, prompt, [output], temperature=0.7)
    text = torch.tensor([prompt + output])
    laws = (spec.target.model(text).logits[0].double() / 0.7).softmax(-1)
    for i, token in enumerate(output):
        law = laws[len(prompt) - 1 + i]
        below = law[law < law[token]].sum()
        assert below - 1e-5 <= numbers[i, 1] <= below + law[token] + 1e-5


@pytest.mark.slow
def test_the_command_gives_a_report_and_exit_code_0(tmp_path):
    from typer.testing import CliRunner

    from treespec.cli import app
    from treespec.heads.checkpoint import save_head

    folder = save_model(tmp_path / "model")
    save_head(random_head(Target.load(str(folder)), seed=1), tmp_path / "head")
    options = {"target": folder, "head": tmp_path / "head", "out": tmp_path / "report.json"}
    options |= {"limit": 2, "tokens": 200, "greedy-tokens": 8, "verifier": "rrs-wo", "tree": "2x2"}
    done = CliRunner().invoke(
        app, ["certify", *(x for name, value in options.items() for x in (f"--{name}", str(value)))]
    )
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert [test["passed"] for test in report["tests"]] == [True] * 4


def test_a_file_that_cannot_be_written_is_said_before_anything_is_loaded(tmp_path):
    with pytest.raises(InputError, match="--out"):
        certify(CertifyConfig("no-model", "no-head", out=str(tmp_path / "missing" / "report.json")))


def test_examine_asks_all_questions(spec):
    config = CertifyConfig("", "", tokens=24, length=3, greedy_tokens=4)
    found = examine(spec, PROMPTS, config)
    assert found["passed"]
    assert len(found["tests"]) == 4
