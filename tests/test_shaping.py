"""Logits that depend on the text, at temperature 0 and in one batch; sampled ones are in test_enumerated.py."""

import pytest
from drafting import source_of
from models import TableConfig, TableModel, random_head
from oracle import distribution
from tiny_pairs import END, NEW, PENALTIES, PROMPT, VOCAB, by_habits, habits, half, penalised
from transformers import RepetitionPenaltyLogitsProcessor

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.shaping.sampling import SamplingParams


@pytest.fixture(scope="module")
def table():
    model = Target(TableModel(TableConfig(VOCAB, seed=1, eos_token_id=END)))
    return Spec(model, random_head(model, seed=2))


@pytest.mark.parametrize(("options", "shaped"), [(PENALTIES, penalised), ({"logits_processor": habits}, by_habits)])
def test_at_temperature_0_each_token_is_the_likeliest_of_the_changed_logits(table, options, shaped):
    ((wanted, _),) = distribution(table.target, PROMPT, NEW, SamplingParams(), shaped, END).items()
    given = Spec(table.target, source_of("lookup", table.target))
    for spec in (
        table.configured("eagle"),
        table,
        Spec(table.target, half(table.target), "3x2"),
        given,
        table.baseline(),
    ):
        outputs = spec.generate([PROMPT, [0, *PROMPT]], max_new_tokens=NEW, **options)
        assert tuple(outputs[0].token_ids) == wanted


def test_texts_of_one_batch_have_laws_of_their_own(table):
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
