"""Logits that depend on the text, at temperature 0 and in one batch; sampled ones are in test_enumerated.py."""

import itertools
import math
from collections import Counter

import pytest
import torch
from models import TableConfig, TableModel, random_head
from transformers import RepetitionPenaltyLogitsProcessor

from treespec.api.spec import Spec
from treespec.draft.sources import source_of
from treespec.draft.vocabulary import restrict
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams, probs

VOCAB, PROMPT, NEW = 4, [1, 2], 4


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
