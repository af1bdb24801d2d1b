"""What a request may ask: where answers end, log-probabilities, samples, cycles, and what is refused."""

import pytest
import torch
from commands import complains, tiny_spec

PROMPT = [1, 5, 9, 30]


@pytest.fixture(scope="module")
def spec():
    return tiny_spec("3x2", "rrs-wo", context=200)


def test_no_end_token_or_stop_string_ends_an_answer_before_min_tokens(spec, monkeypatch):
    tokens = spec.generate(PROMPT, max_new_tokens=40, ignore_eos=True).token_ids
    length = next(n for n in range(3, 12) if tokens[n] not in tokens[:n])
    end = tokens[length]
    monkeypatch.setattr(spec.target, "eos", frozenset([end]))
    answers = [{}, {"min_tokens": 12}, {"ignore_eos": True}]
    short, longer, whole = (spec.generate(PROMPT, max_new_tokens=40, **own).token_ids for own in answers)
    assert (len(short), len(whole)) == (length + 1, 40)
    assert len(longer) >= 12
    assert end not in longer[:11]


def test_a_stop_string_before_min_tokens_is_part_of_the_text(spec):
    text = spec.generate(PROMPT, max_new_tokens=20, ignore_eos=True).text
    stop = next(text[i : i + 2] for i in range(len(text) - 2) if text.count(text[i : i + 2]) == 1)
    options = {"stop": stop, "ignore_eos": True, "max_new_tokens": 20}
    assert stop not in spec.generate(PROMPT, **options).text
    assert spec.generate(PROMPT, min_tokens=20, **options).text == text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_a_plain_forward_whatever_changes_the_logits(spec, temperature):
    options = {"temperature": temperature, "repetition_penalty": 1.5, "max_new_tokens": 12, "seed": 2}
    output = spec.generate(PROMPT, logprobs=True, top_logprobs=3, **options)
    assert spec.generate(PROMPT, **options).token_ids == output.token_ids
    rows = spec.target.model(torch.tensor([[*PROMPT, *output.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    distributions = rows.float().log_softmax(-1)
    assert [told.token for told in output.logprobs] == output.token_ids
    for told, distribution in zip(output.logprobs, distributions, strict=True):
        assert told.logprob == pytest.approx(float(distribution[told.token]), abs=1e-4)
        assert [token for token, _ in told.top] == distribution.topk(3).indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(distribution.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("batch", [None, 2, 1])
@pytest.mark.parametrize("drafts", [True, False])
def test_samples_share_one_prefill_and_equal_separate_answers(spec, monkeypatch, batch, drafts):
    one = spec.new() if drafts else spec.baseline()
    options = {"temperature": 1.0, "max_new_tokens": 9}
    alone = [one.new().generate(PROMPT, seed=7 + i, **options).token_ids for i in range(4)]
    filled = []
    kind = type(spec.target)
    prefill = kind.prefill

    def counted(self, cache, ids, *rest):
        filled.append(ids.shape[1])
        return prefill(self, cache, ids, *rest)

    monkeypatch.setattr(kind, "prefill", counted)
    outputs = one.generate(PROMPT, n=4, seed=7, batch=batch, **options)
    assert [output.token_ids for output in outputs] == alone
    assert sum(filled) - (len(PROMPT) - 1) <= 3  # a shared prefix's last position is computed again
    assert [output.stats.prompt_tokens for output in outputs] == [len(PROMPT)] * 4


def test_several_prompts_have_a_list_of_samples_each(spec):
    options = {"temperature": 1.0, "max_new_tokens": 5}
    outputs = spec.generate([PROMPT, [3, 4]], n=2, seed=7, batch=3, **options)
    alone = [spec.generate([PROMPT, [3, 4]][i // 2], seed=7 + i, **options).token_ids for i in range(4)]
    assert [[one.token_ids for one in samples] for samples in outputs] == [alone[:2], alone[2:]]


def failing(input_ids, scores):
    raise KeyError("of the processor")


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"logit_bias": {-1: 1.0}}, "logit_bias: a token id is -1"),
        ({"logit_bias": {100000: 1.0}}, "token id 100000, which is outside the vocabulary"),
        ({"logit_bias": {1: float("nan")}}, "must be a finite number or -inf"),
        ({"logit_bias": [1]}, "must be a dict"),
        ({"logits_processor": 3}, "logits_processor is 3"),
        ({"min_tokens": 300}, "min_tokens is 300, must be at most max_new_tokens"),
        ({"min_tokens": 250, "max_new_tokens": 250}, "the context holds 196"),
        ({"ignore_eos": 1}, "ignore_eos is 1, must be True or False"),
        ({"n": 2, "on_cycle": print}, "one answer at a time"),
        ({"on_cycle": 3}, "on_cycle is 3, must be a function"),
        ({"chat_template_kwargs": [1]}, "must be a dict"),
        ({"logit_bias": dict.fromkeys(range(290), -torch.inf)}, "forbid every token"),
        ({"logits_processor": lambda ids, scores: scores[:, :3]}, "must return scores of shape"),
        ({"logits_processor": lambda ids, scores: scores * torch.nan}, "scores that are not numbers"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_line(spec, options, complaint):
    with complains(complaint):
        spec.generate(PROMPT, **options)


def test_a_failing_processor_raises_its_error_and_spares_the_next_answer(spec):
    wanted = spec.generate(PROMPT, max_new_tokens=5).token_ids
    with pytest.raises(KeyError, match="of the processor"):
        spec.generate(PROMPT, logits_processor=failing)
    assert spec.generate(PROMPT, max_new_tokens=5).token_ids == wanted
