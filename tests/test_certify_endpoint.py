"""A certificate of a server: exact ones get it, planted faults do not, with token ids and by words alone."""

import io
import json
import threading
from functools import partial
from urllib.error import HTTPError

import commands
import faults
import pytest
import torch
from commands import FakeServer, complains, serving
from faults import draw_before_truncation, plan_at_low_temperature, plan_with_wrong_residual
from typer.testing import CliRunner

from treespec.api.spec import Spec
from treespec.cli import app
from treespec.eval.certify.ranks import ALIKE_QUESTION, BY_P, BY_RATIO, TOKENS_QUESTION
from treespec.eval.certify.run import Examination, certify, examine_server
from treespec.eval.certify.served import ServedEndpoint, ServedQuestion
from treespec.eval.config import CertifyConfig
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams

tiny_spec = partial(commands.tiny_spec, layers=1)
QUESTIONS = ["the user asks", "who is there"]
SHORT = {"tokens": 160, "length": 8}  # enough for a fault of every cycle: p below 1e-20


def verdict(served, tokens=600, length=16, plain=None, **changes):
    """The verdict on a server of `served`, beside the same target without drafts."""
    spec = Spec(served.target, None)
    prompts = {tuple(spec.encode([{"role": "user", "content": question}])): question for question in QUESTIONS}
    with serving(served) as state:
        address = f"{state.url}/v1"
        config = CertifyConfig(
            target="t", endpoint=address, plain=plain and address, tokens=tokens, length=length, **changes
        )
        return examine_server(Examination(spec, [[*prompt] for prompt in prompts], config), prompts)


def p_values(found):
    return {test["test"]: test["p_value"] for test in found["tests"][1:]}


@pytest.mark.parametrize("plain", [False, True])
def test_an_exact_server_is_certified_by_the_ids_of_its_tokens(plain):
    """Beside the target itself, and beside another server."""
    found = verdict(tiny_spec("2x2", "rrs-wo"), plain=plain, **SHORT)
    assert found["passed"], found["tests"]
    assert [*p_values(found)] == [BY_RATIO, BY_P, TOKENS_QUESTION, ALIKE_QUESTION]


@pytest.mark.parametrize("exact", [True, False])
def test_so_is_one_whose_answers_have_a_schema(exact):
    served = tiny_spec("chain:1", "single", context=512, eos=2)
    if not exact:
        faults.plant_scheme(served, planning=argmax)
    schema = {"type": "array", "items": {"enum": [*"abcdefgh"]}, "minItems": 5, "maxItems": 5}
    found = verdict(served, tokens=240 if exact else 900, length=24, json_schema=json.dumps(schema))
    assert found["passed"] == exact, found["tests"]


def test_without_ids_both_sides_are_compared_by_their_words(monkeypatch):
    whole = ServedEndpoint.reply

    def wordy(server, asked):
        server.way = 2
        return whole(server, asked)

    monkeypatch.setattr(ServedEndpoint, "reply", wordy)
    found = verdict(tiny_spec("2x2", "rrs-wo"), **SHORT)
    assert found["passed"], found["tests"]
    assert [*p_values(found)] == [ALIKE_QUESTION]
    sure = tiny_spec("chain:1", "single")
    faults.plant_scheme(sure, planning=argmax)
    assert p_values(verdict(sure))[ALIKE_QUESTION] < 1e-3


def test_ids_are_read_as_each_server_tells_them():
    """vLLM's are fields of a choice, llama.cpp's stand in log-probabilities. Others tell none, or refuse to."""
    in_logprobs = {"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{"id": 5}, {"id": 7}]}}]}
    in_logprobs["choices"][0]["finish_reason"] = "stop"
    in_part = {"choices": [*in_logprobs["choices"], {"delta": {"content": "b"}}]}  # no id of a draft
    server = FakeServer()
    threading.Thread(target=server.serve_forever).start()
    try:
        side = ServedEndpoint("endpoint", server.url, 4, {})
        asked = ServedQuestion("hi", SamplingParams(1.0), 0)
        server.troubles = {1: in_logprobs, 2: in_logprobs, 3: in_part}
        assert [side.reply(asked).token_ids for _ in range(2)] == [[5, 7], [5, 7]]
        assert side.reply(asked).text == "HI"
    finally:
        server.shutdown()
    told = [(body.get("return_token_ids"), body.get("logprobs")) for *_, body in server.requests]
    assert told == [(True, None), (None, True), (None, True), (None, True), (None, None)]


def argmax(scheme, p, q, draws):
    return torch.zeros_like(p).scatter_(1, p.argmax(1, keepdim=True), 1.0)


FAULTS = {
    "drafts accepted by argmax": ("chain:2", "single", argmax),
    "last token without temperature": ("chain:1", "single", plan_at_low_temperature),
    "residual": ("chain:1", "single", plan_with_wrong_residual),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name):
    tree, verifier, planning = FAULTS[name]
    spec = tiny_spec(tree, verifier)
    faults.plant_scheme(spec, planning=planning)
    found = verdict(spec, **({} if name == "residual" else SHORT))
    assert not found["passed"]
    for test in found["tests"][1:]:
        shown = test.get("shown_by")
        assert (shown is None) == (test["passed"] or test["test"] == ALIKE_QUESTION)
        assert shown is None or any(asked in shown["prompt"] for asked in QUESTIONS)


class Repeating:
    """A verifier that begins every cycle with the text's seed."""

    def __init__(self, verifier):
        self.verifier = verifier
        self.name = verifier.name
        self.scheme = verifier.scheme
        self.coupled = verifier.coupled

    def __call__(self, tree, p, generator):
        generator.manual_seed(generator.initial_seed())
        return self.verifier(tree, p, generator)


def test_uniform_numbers_that_every_cycle_repeats_are_found():
    spec = tiny_spec("chain:1", "single")
    spec.verifier = spec.decoder.verifier = Repeating(spec.verifier)
    found = p_values(verdict(spec, **SHORT))
    assert found[TOKENS_QUESTION] < 1e-3 / 4, found


def test_draws_from_before_the_truncation_are_found():
    spec = tiny_spec("8x1", "rrs-wo")
    faults.plant_scheme(spec, drawing=draw_before_truncation)
    found = p_values(verdict(spec))
    assert min(found[BY_P], found[BY_RATIO]) < 1e-3 / 4, found


def test_the_command_names_the_server(home, tmp_path):
    report = tmp_path / "report.json"
    with serving(Spec(Target.load(f"{home}/target"), None)) as state:
        line = (
            f"certify --target {home}/target --endpoint {state.url}/v1 --out {report} --limit 2 --tokens 40 --length 8"
        )
        done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 0, done.output
    assert f"No fault found: {state.url}/v1" in done.output
    found = json.loads(report.read_text())
    assert found["tests"][0]["answers"] == 2


def test_what_cannot_be_asked_is_said(home):
    with complains("--endpoint http://127.0.0.1:9: the server does not answer"):
        certify(CertifyConfig(target=f"{home}/target", endpoint="http://127.0.0.1:9"))
    with complains("--endpoint and --head are both given: a server has its own drafter, so leave out --head"):
        CertifyConfig(target="t", endpoint="http://x/v1", head="h")
    with complains("--plain needs --endpoint"):
        CertifyConfig(target="t", plain="http://x/v1", head="h")


def test_a_server_without_top_k_can_be_asked_without_it():
    """As transformers serve."""
    told = HTTPError("", 422, "", {}, io.BytesIO(b"Unexpected fields in the request: {'top_k'}"))
    assert str(ServedEndpoint("endpoint", "http://x/v1,m", 8, {}).explain_refusal(told)).endswith(
        "; --top-k 0 leaves it out"
    )


def test_a_server_of_another_model_is_refused(home):
    with serving(tiny_spec()) as state, complains("give the --target that it serves"):
        certify(CertifyConfig(target=f"{home}/target", endpoint=f"{state.url}/v1", tokens=40, length=8, limit=1))
