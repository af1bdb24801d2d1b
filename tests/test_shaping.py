"""Logits that depend on the text: the law of whole answers is the shaped one, through the real loop."""

import itertools
import math
from collections import Counter

import pytest
import torch
from models import TableConfig, TableModel, random_eagle3, random_head
from scipy.stats import chi2
from test_sequence_law import ERROR, chi_square
from transformers import RepetitionPenaltyLogitsProcessor

from treespec.api.spec import Spec
from treespec.draft.sources import source_of
from treespec.draft.vocabulary import restrict
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, probs

VOCAB, PROMPT, NEW = 4, [1, 2], 4
WARM = SamplingParams(0.8)


def habits(input_ids, scores):
    """A processor: each token counts against itself, and the sum of all decides which one is forbidden."""
    counts = torch.stack([row.bincount(minlength=VOCAB) for row in input_ids])
    scores = scores - 0.9 * counts
    return scores.scatter(1, input_ids.sum(1, keepdim=True) % VOCAB, -torch.inf)


def all_at_once(tokens, logits):
    """What ALL asks for, by the definitions in OpenAI's reference and of transformers; one row, in float64."""
    answer = tokens[len(PROMPT) :]
    row = logits.clone()
    row[3] += 0.7
    for token in set(tokens):
        row[token] = row[token] / 1.4 if row[token] > 0 else row[token] * 1.4
    for token, count in Counter(answer).items():
        row[token] -= 0.6 * count + 0.5
    if len(answer) < 2:
        row[0] = -torch.inf
    return row


def by_habits(tokens, logits):
    return habits(torch.tensor([tokens]), logits[None])[0]


ALL = {
    "logit_bias": {3: 0.7},
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.6,
    "min_tokens": 2,
}


def law_of_answers(model, shaped, params, end=None):
    """{answer: probability} of all answers, each computed by itself: `shaped(tokens so far, logits)`."""
    laws = Counter()
    for answer in itertools.product(range(VOCAB), repeat=NEW):
        tokens = [*PROMPT, *answer]
        logits = model.model(torch.tensor([tokens])).logits[0, 1:-1].double()
        rows = [probs(shaped(tokens[: len(PROMPT) + n], logits[n]), params) for n in range(NEW)]
        said = answer[: answer.index(end) + 1] if end in answer else answer
        laws[said] += math.prod(float(row[token]) for row, token in zip(rows, answer, strict=True))
    assert sum(laws.values()) == pytest.approx(1)
    return laws


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(VOCAB, seed=1, eos_token_id=0)))
    return Spec(model, random_head(model, seed=2))


def check(spec, options, shaped, params=WARM, runs=200, end=0):
    """Answers to PROMPT and to others beside it in the batch, by χ² against the law of all answers."""
    wanted = law_of_answers(spec.target, shaped, params, end)
    law = {"temperature": params.temperature, "top_k": params.top_k}
    outputs = spec.generate([PROMPT] * runs, batch=50, seed=0, max_new_tokens=NEW, **law, **options)
    seen = Counter(tuple(output.token_ids) for output in outputs)
    assert all(wanted[answer] > 0 for answer in seen)
    statistic, freedom = chi_square([seen[answer] for answer in wanted], list(wanted.values()))
    assert freedom > 8
    assert statistic < chi2.isf(ERROR, freedom)


SLOW = [("block", "chain:3"), ("topk", "dynamic:depth=2,topk=3,nodes=6"), ("is-lp", "2x2"), ("greedy", "2x2")]


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [("rrs-wo", "2x2"), ("traversal", "3x2")] + [pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW],
)
def test_answers_by_penalties_and_biases_have_their_law(table, verifier, tree):
    check(table.configured(tree, verifier), ALL, all_at_once)


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [("block", "chain:3")] + [pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW[1:]],
)
def test_answers_by_a_processor_have_its_law(table, verifier, tree):
    options = {"logits_processor": habits, "ignore_eos": True}
    check(table.configured(tree, verifier), options, by_habits, SamplingParams(1.2, top_k=3), end=None)


@pytest.mark.slow
@pytest.mark.parametrize(("drafted", "tree"), [([1, 3], "2x2"), ([0, 1, 2, 3], "eagle")])
def test_a_draft_vocabulary_changes_nothing_about_it(table, drafted, tree):
    head = random_eagle3(table.target, seed=2, drafted=torch.tensor(drafted))
    check(Spec(table.target, head, tree, "rrs-wo"), ALL, all_at_once)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["lookup", "lookahead:window=3,ngram=3"])
def test_drafters_without_a_law_change_nothing_about_it(table, drafter):
    check(Spec(table.target, source_of(drafter, table.target)), ALL, all_at_once)


@pytest.mark.parametrize(("options", "shaped"), [(ALL, all_at_once), ({"logits_processor": habits}, by_habits)])
def test_at_temperature_0_each_token_is_the_likeliest_of_the_changed_logits(table, options, shaped):
    head = random_head(table.target, seed=2)
    restrict(head, table.target, torch.tensor([1, 3]))
    wanted = max((laws := law_of_answers(table.target, shaped, SamplingParams(), end=0)), key=laws.__getitem__)
    given = Spec(table.target, source_of("lookup", table.target))
    for spec in (table.configured("eagle"), table, Spec(table.target, head, "3x2"), given, table.baseline()):
        outputs = spec.generate([PROMPT, [0, *PROMPT]], max_new_tokens=NEW, **options)
        assert tuple(outputs[0].token_ids) == wanted


def test_texts_of_one_batch_have_laws_of_their_own(table):
    """Together as alone: greedy and sampled, with penalties and without."""
    spec = table.configured("3x2", "rrs-wo")
    each = [{}, ALL, {"temperature": 1.0}, {"temperature": 0.7, "logits_processor": habits}, {"top_k": 2} | ALL]
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
