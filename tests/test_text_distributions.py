"""Distributions of whole texts by χ², and shaped logits at temperature 0; test_enumerated.py has the rest."""

import itertools
from collections import Counter

import pytest
import torch
from drafters import END, NEW, PENALTIES, PROMPT, TABLE_VOCAB, by_habits, habits, half, penalised, source_of, spec_of
from models import TableConfig, TableModel, random_head
from reference import ERROR_PROBABILITY, chi_square, text_probs
from scipy.stats import chi2
from transformers import RepetitionPenaltyLogitsProcessor

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams, compute_probs


def test_optimal_gives_the_targets_distribution():
    """Its scores are continuous, which no oracle enumerates.

    A text of a target of 4 tokens is cut into blocks of two. The distribution of a block given the two tokens before
    it is the table's, wherever the cycles began and ended, so the χ² of all contexts add up.
    """
    spec = spec_of("eagle", "2x2", "optimal")
    params = SamplingParams(temperature=0.8)
    contexts = {pair: Counter() for pair in itertools.product(range(4), repeat=2)}
    for out in spec.generate([[1, 2]] * 2, temperature=0.8, max_new_tokens=400, seed=0):
        text = [1, 2, *out.token_ids]
        for i in range(2, len(text) - 1, 2):
            contexts[tuple(text[i - 2 : i])][tuple(text[i : i + 2])] += 1
    statistic = freedom = 0
    for pair, blocks in contexts.items():
        distribution = text_probs(spec.target, list(pair), 2, params)
        one, cells = chi_square([blocks[block] for block in distribution], list(distribution.values()))
        statistic = statistic + one
        freedom = freedom + cells
    assert freedom > 30
    assert statistic < chi2.isf(ERROR_PROBABILITY, freedom)


@pytest.mark.parametrize("drafter", ["none", "eagle"])
def test_two_turns_of_one_seed_repeat_tokens_as_often_as_chance(drafter):
    """The draws of a turn tell nothing of those of the turn before. 0.06 are more than three standard errors."""
    spec = spec_of(drafter, "2x2" if drafter == "eagle" else None, "rrs-wo")
    runs = 600
    options = {"temperature": 1.0, "max_new_tokens": 1, "seed": list(range(runs)), "batch": 300}
    turns = []
    prompts = [[1, 2]] * runs
    for _ in range(2):
        turns.append([out.token_ids for out in spec.generate(prompts, **options)])
        prompts = [[*prompt, *said, 1, 2] for prompt, said in zip(prompts, turns[-1], strict=True)]
    distribution = compute_probs(spec.target.model(torch.tensor([[1, 2]])).logits[0, -1].double(), SamplingParams(1.0))
    equal = sum(one[0] == other[0] for one, other in zip(*turns, strict=True)) / runs
    assert equal == pytest.approx(float((distribution**2).sum()), abs=0.06)


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(TABLE_VOCAB, seed=1, eos_token_id=END)))
    return Spec(model, random_head(model, seed=2))


@pytest.mark.parametrize("options, shaped", [(PENALTIES, penalised), ({"logits_processor": habits}, by_habits)])
def test_at_temperature_0_each_token_is_the_argmax_of_changed_logits(table, options, shaped):
    ((wanted, _),) = text_probs(table.target, PROMPT, NEW, SamplingParams(), shaped, END).items()
    given = Spec(table.target, source_of("suffix:tokens=0", table.target))
    for spec in (
        table.configured("eagle"),
        table,
        Spec(table.target, half(table.target), "3x2"),
        given,
        table.baseline(),
    ):
        outputs = spec.generate([PROMPT, [0, *PROMPT]], max_new_tokens=NEW, **options)
        assert tuple(outputs[0].token_ids) == wanted


def test_texts_of_one_batch_have_their_own_distributions(table):
    """Together as alone: greedy and sampled, with penalties and without."""
    spec = table.configured("3x2", "rrs-wo")
    each = [
        {},
        PENALTIES,
        {"temperature": 1.0},
        {"temperature": 0.7, "logits_processor": habits},
        {"top_k": 2} | PENALTIES,
    ]
    alone = [spec.generate(PROMPT, seed=4, max_new_tokens=20, **options).token_ids for options in each]
    texts = [spec.request(PROMPT, seed=4, max_new_tokens=20, **options) for options in each]
    together = {text: [] for text in texts}
    for text, piece in spec.decoder.run(texts, len(texts)):
        together[text] += piece.token_ids
    assert list(together.values()) == alone


def test_our_repetition_penalty_is_that_of_transformers(table):
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "seed": 1, "max_new_tokens": 30, "ignore_eos": True}
        theirs = table.generate(PROMPT, logits_processor=RepetitionPenaltyLogitsProcessor(1.4), **options)
        assert theirs.token_ids == table.generate(PROMPT, repetition_penalty=1.4, **options).token_ids
