"""Whole texts have the target's distribution, exactly, and drafters accept what they accepted: by enumeration."""

import json
import os
from itertools import product
from pathlib import Path

import faults
import pytest
import torch
from drafters import PROMPT, WAYS, spec_of
from reference import TEXT_PROB_TOLERANCE, enumerate_texts

from treespec.draft import cycle, tree_drafter
from treespec.draft.tree_assembly import ShapedDrafts
from treespec.trees.static import StaticTree

SAME = 1e-4
FROZEN = Path(__file__).with_name("enumerated.json")  # mean cycles of each set-up below
CYCLES = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}

SHAPED = ("top-k", "penalties", "processor", "end")
SURE = "block-optimal:threshold=0,extra=0"
WIDE = [(name, "2x2") for name in ("topk", "rrs-wo", "traversal", "greedy", "spechub")]
REPLACED = [(name, "2x1") for name in ("rrs", "kseq", "is-lp", SURE)]
CHAINS = [(name, "chain:2") for name in ("single", "block", "rrs", "is-lp:s=2")]
HEADS = ["eagle", "eagle, half the tokens", "eagle3", "eagle4", "medusa", "hydra", "hydra++", "dflash", "p-eagle"]
CONDITIONAL = ["dspark", "dflash2", "domino", "dspine"]  # levels of a block that depend on the tokens above
MODELS = ["other vocabulary", "suffix+model", "pard"]
UNSURE_CHAIN = "confident:depth=2,threshold=0.5,step=0.4,goal=0.6,threshold_memory=0"
GROWN = [
    ("model", "topk", "auto:depth=2,topk=2"),
    ("suffix+model", "topk", "auto:depth=2,topk=2"),
    ("suffix+eagle", "topk", "dynamic:depth=2,topk=3,nodes=6"),
    ("model", "topk", "dynamic:depth=2,topk=3,nodes=6"),
    ("model", "topk", "eagle"),
    ("model", SURE, "levels:1x2"),
    ("medusa", "topk", "medusa"),
    ("medusa", "rrs-wo", "ddtree:nodes=5"),
    ("dflash", "traversal", "ddtree:nodes=5"),
    ("dflash", SURE, "2x2"),
    ("p-eagle", "topk", "ddtree:nodes=5"),
]
FORESEEN = [("dspark", "traversal", "ddtree:nodes=4"), ("domino", "topk", "ddtree:nodes=5")]  # levels by predictions
SETUPS = [
    *(("model", verifier, tree, way, 64) for (verifier, tree), way in product([*WIDE, *REPLACED, *CHAINS], SHAPED)),
    *(("model", verifier, tree, way, 64) for (verifier, tree), way in product(CHAINS[:2], ("top-p", "min-p"))),
    *(("model", "topk", "2x2", way, 64) for way in ("warm", "greedy")),
    *((drafter, *pair, "top-k", 64) for drafter, pair in product([*HEADS, *MODELS], WIDE[:2])),
    *((drafter, "traversal", "2x2", "penalties", 64) for drafter in (*HEADS, *MODELS)),
    *((drafter, verifier, "2x2", "top-k", 64) for drafter, verifier in product(CONDITIONAL, ("topk", "rrs-wo"))),
    ("dspark", "traversal", "2x2", "penalties", 64),
    ("dspark", "topk", "dynamic:depth=2,topk=3,nodes=6", "top-k", 64),
    *(("suffix", "topk", None, way, 64) for way in ("greedy", "warm", "top-p", "min-p", *SHAPED)),
    *((found, "topk", None, way, 64) for found, way in product(("prompt-lookup:3", "rest"), ("greedy", "warm", "end"))),
    *(("jacobi", "topk", None, way, 64) for way in ("greedy", "warm", "penalties")),
    *(("lookahead", "topk", None, way, 64) for way in ("greedy", "warm", *SHAPED)),
    *(("recurrent", "rrs-wo", tree, "top-k", 64) for tree in ("chain:2", "2x2")),
    ("self", "rrs-wo", "2x1", "top-k", 64),
    *(("model", name, UNSURE_CHAIN, way, 64) for name, way in product(("single", "block", "topk"), SHAPED[:2])),
    ("self", "rrs", UNSURE_CHAIN, "top-k", 1),
    ("self", "topk", "2x2", "greedy", 64),
    *((*grown, way, 64) for grown, way in product(GROWN, ("top-k", "penalties"))),
    *(("suffix+model", *pair, "top-k", 64) for pair in (*REPLACED, *CHAINS[:2], *WIDE[3:])),
    ("eagle", SURE, "2x2", "top-k", 64),
    *((*foreseen, "top-k", 64) for foreseen in FORESEEN),
    *(("model", *pair, "processor", 1) for pair in (WIDE[0], WIDE[2], CHAINS[1])),
    *(("none", "topk", None, way, 64) for way in WAYS),
]


def enumerate_setup(drafter, verifier, tree, way, batch, **how):
    if drafter.startswith("suffix"):
        how |= {"recall": True, "memory": "texts"}
    return enumerate_texts(spec_of(drafter, tree, verifier, WAYS[way].end), way, batch, **how)


def named(setup):
    return " | ".join(str(part) for part in setup if part is not None)


# A verifier gets p and q, however they were shaped and whatever drafted. `make test` takes a covering set: each
# verifier, drafter, tree and way, and of their pairs these. `make test-products` runs the others too.
VERIFIERS_BY_WAY = {  # of a draft model; top-k for all of them
    "penalties": ("topk", "rrs-wo", "block"),
    "processor": ("topk", "traversal", "single"),
    "end": ("topk", "block"),
    "top-p": ("block",),
    "min-p": ("single",),
}
DRAWN_FROM = ("model", "eagle3", "eagle4", "hydra++", "p-eagle", "dflash2", "dspine", "other vocabulary", "recurrent")
PENALISED = ("eagle", "dspark", "suffix+model")  # with `traversal` on 2x2
RARE = [
    *(("model", "block", "chain:2", "processor", 64), ("model", "block", UNSURE_CHAIN, "top-k", 64)),
    *(("model", name, tree, "processor", 1) for name, tree in WIDE),
    ("model", "single", UNSURE_CHAIN, "penalties", 64),
    *((name, "traversal", "ddtree:nodes=5", "top-k", 64) for name in ("dflash", "p-eagle")),
    ("medusa", "rrs-wo", "ddtree:nodes=5", "top-k", 64),
    ("recurrent", "rrs-wo", "chain:2", "top-k", 64),
    *((name, "topk", None, "warm", 64) for name in ("rest", "lookahead", "suffix")),
    *(("suffix+model", name, tree, "top-k", 64) for name, tree in [*REPLACED[1:], CHAINS[0], WIDE[4]]),
]


def is_rare(setup):
    drafter, verifier, tree, way, batch = setup
    if (
        drafter == "model"
        and tree != UNSURE_CHAIN
        and batch == 64
        and verifier not in VERIFIERS_BY_WAY.get(way, verifier)
    ):
        return True
    is_drawn = (verifier, way) == ("rrs-wo", "top-k") and "ddtree" not in tree
    is_penalised = (verifier, tree, way) == ("traversal", "2x2", "penalties")
    return setup in RARE or (is_drawn and drafter not in DRAWN_FROM) or (is_penalised and drafter not in PENALISED)


SETUPS_BY_TIME = [pytest.param(setup, id=named(setup), marks=[pytest.mark.slow] * is_rare(setup)) for setup in SETUPS]


@pytest.mark.parametrize("setup", SETUPS_BY_TIME)
def test_texts_have_the_targets_distribution_and_cycles_their_length(setup):
    """A change of a drafter that is meant to change its acceptance writes the new mean into enumerated.json."""
    error, cycles = enumerate_setup(*setup)
    assert error < TEXT_PROB_TOLERANCE
    assert cycles == pytest.approx(CYCLES.get(named(setup)), abs=SAME)


@pytest.mark.parametrize(
    "fault, tree, verifier",
    [
        (faults.draws_from_a_hotter_distribution, "2x2", "rrs-wo"),
        (faults.draws_from_a_hotter_distribution, "chain:2", "single"),
        (faults.drops_draws_without_nodes, StaticTree(((1,),)), "rrs-wo"),
        (faults.commits_a_sibling, "2x2", "topk"),
        (faults.plans_for_another_distribution, "2x2", "rrs-wo"),
    ],
)
def test_faults_of_exactness_are_found(fault, tree, verifier):
    if tree not in ("2x2", "chain:2"):  # which are set-ups above
        assert enumerate_texts(spec_of("model", tree, verifier))[0] < TEXT_PROB_TOLERANCE
    spec = spec_of("model", tree, verifier)
    fault(spec)
    assert enumerate_texts(spec, reuse=False)[0] > 1e-3


def unshaped_below_the_first_level(monkeypatch):
    shape = cycle.process_draft_logits

    def first_level(distribution, paths, rows, *rest):
        return ShapedDrafts(rows, rows) if paths[0] else shape(distribution, paths, rows, *rest)

    monkeypatch.setattr(cycle, "process_draft_logits", first_level)


def draws_one_node_off(monkeypatch):
    shape = cycle.process_draft_logits

    def rolled(distribution, paths, rows, *rest):
        return shape(distribution, [*paths[-1:], *paths[:-1]], rows, *rest)

    monkeypatch.setattr(cycle, "process_draft_logits", rolled)


def features_of_the_token_before(monkeypatch):
    observe = tree_drafter.TreeDrafter.observe

    def shifted(drafter, features, tokens):
        observe(drafter, [rows.roll(1, 0) for rows in features], tokens)

    monkeypatch.setattr(tree_drafter.TreeDrafter, "observe", shifted)


@pytest.mark.parametrize(
    "fault, setup",
    [
        (unshaped_below_the_first_level, ("model", "topk", "2x2", "processor", 64)),
        (draws_one_node_off, ("model", "topk", "2x2", "processor", 64)),
        (features_of_the_token_before, ("eagle", "topk", "2x2", "top-k", 64)),
        (features_of_the_token_before, ("p-eagle", "topk", "2x2", "top-k", 64)),
    ],
)
def test_faults_that_only_cost_acceptance_are_found(fault, setup, monkeypatch):
    fault(monkeypatch)
    error, cycles = enumerate_setup(*setup, reuse=False)
    assert error < TEXT_PROB_TOLERANCE
    assert abs(cycles - CYCLES[named(setup)]) > 10 * SAME


LONG = [
    ("model", "topk", "auto:depth=4,topk=3"),
    ("eagle", "topk", "auto:depth=4,topk=3"),
    ("suffix", "topk", None),
    ("jacobi", "topk", None),
    ("lookahead", "topk", None),
    ("suffix+model", "topk", "2x2"),
    ("suffix+eagle", "rrs-wo", "2x2"),
]


def long_text(drafter, verifier, tree):
    """Cycles of a text of 80 tokens that is drawn with one seed, and its tokens at temperature 0."""
    spec = spec_of(drafter, tree, verifier)
    options = {"max_new_tokens": 80, "memory": "texts", "remember": False}
    greedy = spec.generate(PROMPT, seed=5, **options)
    assert greedy.token_ids == spec.baseline().generate(PROMPT, max_new_tokens=80).token_ids
    drawn = spec.generate([PROMPT], seed=5, temperature=1.0, **options)[0]
    return [greedy.stats.cycles, drawn.stats.cycles]


@pytest.mark.parametrize("setup", LONG, ids=named)
def test_long_texts_take_the_cycles_that_they_took(setup):
    """Growers and caches learn over many cycles."""
    assert long_text(*setup) == CYCLES["long | " + named(setup)]


def test_a_grower_without_feedback_is_found(monkeypatch):
    monkeypatch.setattr(tree_drafter.TreeDrafter, "update", lambda *_: None)
    assert long_text(*LONG[1]) != CYCLES["long | " + named(LONG[1])]


def test_a_completion_that_is_cancelled_as_it_ends_is_not_remembered():
    def cycles_after(cancelled):
        spec = spec_of("suffix")
        text = spec.request(PROMPT, max_new_tokens=60, memory="new")
        text.listener = lambda _: setattr(text, "cancelled", cancelled and text.ending.finished)
        assert sum(len(piece.token_ids) for _, piece in spec.decoder.run([text])) == 60
        return spec.generate(PROMPT, max_new_tokens=60, memory="new").stats.cycles

    assert cycles_after(cancelled=True) > cycles_after(cancelled=False)


def test_there_are_140_setups_of_their_own():
    assert len(SETUPS) >= 140
    assert {*map(named, SETUPS), *("long | " + named(setup) for setup in LONG)} == CYCLES.keys()
    assert torch.get_num_threads() <= int(os.environ["OMP_NUM_THREADS"])  # no more than there are cores
