"""Faults that tests once passed: each is planted, and the test that names it must fail."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import test_cost
import test_kernels
import test_same_text
import test_suffix
import torch
from mutants import plant

from treespec.draft.auto import cost_model as running
from treespec.draft.auto.cost_model import Choice
from treespec.draft.tree_drafter import TreeDrafter
from treespec.engine.request import Request
from treespec.kernels import ops as kernels
from treespec.sampling.noise import Noise
from treespec.sampling.sampler import Distribution


@dataclass(frozen=True)
class Fault:
    """A function of `owner` with `old` made `new`, and a call of the test that must find it."""

    owner: Any
    name: str
    old: str
    new: str
    test: Callable[[], None]


def seeded_answers():
    test_suffix.test_a_sampled_answer_with_a_seed_is_drafted_from_its_text_alone("suffix", None, "topk")


def text_by_definition():
    test_same_text.test_the_text_of_a_seed_is_that_of_its_definition(7)


def deep_chain():
    test_same_text.test_no_drafter_changes_the_text_of_a_seed("model", "plain")


OWN_MEMORY = "return None if by.seeded and not (by.greedy or by.noise) else self.memory"
OWN_NOISE = "noise = noise if vocabulary is None else noise[vocabulary]"
FAULTS = {
    "answers drawn with a caller's seed read the memory": Fault(
        Request, "recalled", OWN_MEMORY, "return self.memory", seeded_answers
    ),
    "one noise for all depths beyond 3, by definition": Fault(
        Noise, "at", "self.position + depth", "self.position + min(depth, 3)", text_by_definition
    ),
    "one noise for all depths beyond 3, by baseline": Fault(
        Noise, "at", "self.position + depth", "self.position + min(depth, 3)", deep_chain
    ),
    "half a vocabulary gets the noise of the first tokens": Fault(
        Distribution,
        "scores",
        OWN_NOISE,
        OWN_NOISE.replace("[vocabulary]", "[: len(vocabulary)]"),
        test_same_text.test_half_the_vocabulary_drafts_each_output_that_it_holds,
    ),
    "half a vocabulary gets the noise of the first tokens, on an accelerator": Fault(
        TreeDrafter,
        "_noise",
        "noise[:, vocabulary]",
        "noise[:, : len(vocabulary)]",
        test_same_text.test_the_noise_of_all_levels_is_that_of_the_drafted_tokens,
    ),
    "the choice of drafts never forgets tokens": Fault(
        Choice,
        "update",
        "WINDOW * self.tokens",
        "self.tokens",
        test_cost.test_a_choice_follows_what_the_draft_model_brings_now,
    ),
    "the choice of drafts never forgets cycles": Fault(
        Choice,
        "update",
        "WINDOW * self.cycles",
        "self.cycles",
        test_cost.test_a_choice_follows_what_the_draft_model_brings_now,
    ),
    "the choice of drafts never forgets seconds": Fault(
        Choice,
        "update",
        "WINDOW * (self.seconds or CYCLES * seconds)",
        "(self.seconds or CYCLES * seconds)",
        test_cost.test_a_choice_follows_what_the_draft_models_cycles_cost_now,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(monkeypatch, name):
    fault = FAULTS[name]
    fault.test()
    plant(monkeypatch, fault.owner, fault.name, fault.old, fault.new)
    with pytest.raises(AssertionError):
        fault.test()


def test_a_choice_that_never_forgets_is_found(monkeypatch):
    monkeypatch.setattr(running, "WINDOW", 1.0)
    with pytest.raises(AssertionError):
        test_cost.test_a_choice_follows_what_the_draft_model_brings_now()
    with pytest.raises(AssertionError):
        test_cost.test_a_choice_follows_what_the_draft_models_cycles_cost_now()


@pytest.mark.skipif(kernels.library() is None, reason="no C compiler")
def test_keys_normed_by_the_weight_of_the_queries_are_found(monkeypatch, tmp_path):
    """A fault in layer.c."""
    old = "norm = key ? OF_KEYS : OF_QUERIES;"
    new = "norm = OF_QUERIES;"
    assert sum(source.read_text().count(old) for source in kernels.SOURCES) == 1
    for source in kernels.SOURCES:
        (tmp_path / source.name).write_text(source.read_text().replace(old, new))
    monkeypatch.setattr(kernels, "SOURCES", [tmp_path / source.name for source in kernels.SOURCES])
    kernels.library.cache_clear()
    try:
        with pytest.raises(AssertionError):
            test_kernels.test_a_fused_layer_has_the_output_of_its_modules("qwen3", 3, torch.float32)
    finally:
        kernels.library.cache_clear()
