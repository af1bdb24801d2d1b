"""Logits that depend on the text: the law of whole answers is the shaped one, through the real loop, by χ²."""

import itertools
import math
from collections import Counter

import pytest
import torch
from models import TableConfig, TableModel, random_head
from scipy.stats import chi2
from test_sequence_law import ERROR, chi_square

from treespec.draft.vocabulary import restrict
from treespec.sampling import SamplingParams, probs
from treespec.shaping.law import Law
from treespec.spec import Spec
from treespec.target import Target

VOCAB, PROMPT, NEW = 4, [1, 2], 4


class Habits:
    """Every token counts against itself, and the tokens so far decide which one is forbidden."""

    def __init__(self, prompt=()):
        self.prompt = prompt

    def begin(self, prompt):
        return Habits(tuple(prompt))

    def shape(self, answer, paths, logits):
        rows = []
        for path, row in zip(paths, logits, strict=True):
            said = [*answer, *path]
            counts = torch.bincount(torch.tensor(said, dtype=torch.int64), minlength=VOCAB)
            row = row - 0.9 * counts.to(row)
            row[(sum(self.prompt) + sum(said)) % VOCAB] = -torch.inf
            rows.append(row)
        return torch.stack(rows)


def law_of_answers(model, shaper, params):
    """{answer: probability} of all answers of NEW tokens, each shaped by itself."""
    laws = {}
    for answer in itertools.product(range(VOCAB), repeat=NEW):
        logits = model.model(torch.tensor([[*PROMPT, *answer]])).logits[0, 1:-1].double()
        begun = shaper.begin(PROMPT)
        rows = [begun.shape([], [answer[:n]], logits[n : n + 1])[0] for n in range(NEW)]
        laws[answer] = math.prod(float(probs(row, params)[token]) for row, token in zip(rows, answer, strict=True))
    assert sum(laws.values()) == pytest.approx(1)
    return laws


def shaped_answers(spec, shaper, params, runs, batch):
    texts = []
    for seed in range(runs):
        text = spec.request(PROMPT, seed=seed, max_new_tokens=NEW)
        text.law = Law(params, [shaper.begin(PROMPT)])
        texts.append(text)
    answers = {text: [] for text in texts}
    for text, piece in spec.decoder.run(texts, batch):
        answers[text] += piece.token_ids
    return [tuple(answer) for answer in answers.values()]


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(VOCAB, seed=1)))
    return Spec(model, random_head(model, seed=2))


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [("rrs-wo", "2x2"), ("traversal", "3x2")]
    + [
        pytest.param(*pair, marks=pytest.mark.slow)
        for pair in (("block", "chain:3"), ("topk", "dynamic:depth=2,topk=3,nodes=6"))
    ],
)
def test_shaped_answers_have_the_shaped_law(table, verifier, tree):
    params = SamplingParams(0.8)
    wanted = law_of_answers(table.target, Habits(), params)
    seen = Counter(shaped_answers(table.configured(tree, verifier), Habits(), params, 300, batch=50))
    assert all(wanted[answer] > 0 for answer in seen)
    statistic, freedom = chi_square([seen[answer] for answer in wanted], list(wanted.values()))
    assert freedom > 8
    assert statistic < chi2.isf(ERROR, freedom)


def test_at_temperature_0_the_answer_is_the_likeliest_shaped_token_each_time(table):
    head = random_head(table.target, seed=2)
    restrict(head, table.target, torch.tensor([1, 3]))
    wanted = law_of_answers(table.target, Habits(), SamplingParams())
    likeliest = max(wanted, key=wanted.__getitem__)
    for spec in (table.configured("eagle"), Spec(table.target, head, "3x2"), table.baseline()):
        assert shaped_answers(spec, Habits(), SamplingParams(), 2, batch=2) == [likeliest] * 2
