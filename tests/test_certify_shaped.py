"""A certificate of answers whose logits are changed: exact verifiers get it, a fault of the changes does not."""

from dataclasses import replace

import pytest
from certifying import CONFIG, PROMPTS, tiny

from treespec.errors import InputError
from treespec.eval.certify.run import Examination
from treespec.shaping.processors import Penalties

PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
SHORT = replace(CONFIG, tokens=120, length=12, greedy_tokens=12, **PENALTIES)


def test_answers_by_penalties_and_biases_are_certified():
    biased = replace(SHORT, logit_bias=["3=1.5", "4=-inf"])
    assert biased.changes()["logit_bias"] == {3: 1.5, 4: float("-inf")}
    found = Examination(tiny("3x2", "rrs-wo"), PROMPTS, biased).verdict()
    assert found["passed"], found["tests"]


def test_a_bias_that_is_not_understood_is_refused_at_once():
    with pytest.raises(InputError, match="--logit-bias 'x=1'"):
        replace(SHORT, logit_bias=["x=1"])


def test_greedy_answers_that_leave_out_a_path_are_found(monkeypatch):
    """Penalties that count the committed answer alone, not the node's own path, give other answers."""
    exact = Penalties.shape

    def of_the_answer(self, answer, paths, logits):
        return exact(self, answer, [()] * len(paths) if answer else paths, logits)

    monkeypatch.setattr(Penalties, "shape", of_the_answer)
    found = Examination(tiny("3x2", "rrs-wo"), PROMPTS, SHORT).verdict()
    assert not found["passed"]


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "verifier"), [("chain:3", "block"), ("3x2", "traversal"), ("3x2", "topk")])
def test_other_verifiers_get_it_too(tree, verifier):
    found = Examination(tiny(tree, verifier), PROMPTS, replace(SHORT, tokens=400, length=24)).verdict()
    assert found["passed"], found["tests"]
