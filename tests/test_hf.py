"""`model.generate(custom_generate=Trees(head))`: generate's own tokens, and its distribution when it samples."""

from collections import Counter

import pytest
import torch
from commands import complains
from models import random_head
from reference import ERROR_PROBABILITY, chi_square
from scipy.stats import chi2
from training import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, StoppingCriteria, TextIteratorStreamer

from treespec.api.hf import Trees
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

PROMPT = torch.tensor([[5, 9, 33, 12, 7]])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A model of its own beside the one that trees change, and a head."""
    folder = tmp_path_factory.mktemp("hf")
    save_model(folder / "target")
    plain, changed = (AutoModelForCausalLM.from_pretrained(folder / "target") for _ in range(2))
    save_head(random_head(Target(changed)), folder / "head")
    return plain, changed, AutoTokenizer.from_pretrained(folder / "target"), folder / "head"


@pytest.fixture(scope="module")
def trees(pair):
    return Trees(pair[3], "2x4", "rrs-wo")


def both(pair, trees, inputs, **options):
    """generate's tokens, and those with trees."""
    plain, changed, _, _ = pair
    options = {"pad_token_id": 0, "max_new_tokens": 24, "return_dict_in_generate": True} | options
    own = plain.generate(inputs, **options)
    drafted = changed.generate(inputs, custom_generate=trees, **options)
    return own.sequences.tolist(), drafted.sequences.tolist()


class EndsAfterTwo(StoppingCriteria):
    """Ends a text whose last two tokens add up to an even number."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -2:].sum(1) % 2 == 0) & (input_ids.shape[1] > PROMPT.shape[1] + 3)


class ByLength(LogitsProcessor):
    """Forbids tokens by the length of the text so far."""

    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.arange(input_ids.shape[1] % 7, scores.shape[1], 7), -torch.inf)


float32_alone = pytest.mark.skipif(
    torch.get_default_dtype() != torch.float32, reason="transformers' own processor fails under another default dtype"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 12, "eos_token_id": list(range(40, 60))},
        {"eos_token_id": list(range(100, 200))},
        {"logits_processor": [ByLength()]},
        {"stopping_criteria": [EndsAfterTwo()]},
        {"max_new_tokens": None, "max_length": 11},
        {"prefix_allowed_tokens_fn": lambda row, ids: [row + int(ids[-1]) % 50, 60, 70]},
        pytest.param({"bad_words_ids": [[7], [9, 12]]}, marks=float32_alone),
    ],
    ids="-".join,
)
def test_at_temperature_0_the_tokens_are_generates_own(pair, trees, options):
    own, drafted = both(pair, trees, PROMPT, do_sample=False, **options)
    assert own == drafted


def test_rows_of_unequal_length_are_decoded_together(pair, trees):
    """With the padding that generate gives the processors, and padding behind the shorter answers."""
    rows = [[5, 9, 33], [8, 7, 6, 5, 4, 3], [11]]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    options = {"attention_mask": mask, "eos_token_id": list(range(60, 90)), "repetition_penalty": 1.2}
    options["prefix_allowed_tokens_fn"] = lambda row, ids: list(range(row + int(ids[-1]) % 50, 290, 3))
    own, drafted = both(pair, trees, ids, do_sample=False, **options)
    assert own == drafted
    assert len(trees.stats) == 3
    assert all(stats.acceptance_length >= 1 for stats in trees.stats)


def next_probs(model, ids, options):
    """[V] the distribution of generate's next token, by the scores that it samples from."""
    told = {"output_scores": True, "return_dict_in_generate": True}
    out = model.generate(torch.tensor([ids]), max_new_tokens=1, do_sample=True, pad_token_id=0, **options, **told)
    return out.scores[0][0].double().softmax(-1).tolist()


def test_sampled_tokens_have_the_distribution_of_generate(pair, trees):
    """Two tokens by χ² against the distribution that generate samples them from."""
    options = {"top_k": 4, "typical_p": 0.9, "repetition_penalty": 1.5}
    distribution = {}
    for first, p in enumerate(next_probs(pair[0], PROMPT[0].tolist(), options)):
        if p:
            following = next_probs(pair[0], [*PROMPT[0].tolist(), first], options)
            distribution |= {(first, second): p * q for second, q in enumerate(following) if q}
    torch.manual_seed(0)
    out = pair[1].generate(
        PROMPT.expand(100, -1), max_new_tokens=2, do_sample=True, pad_token_id=0, custom_generate=trees, **options
    )
    seen = Counter(map(tuple, out[:, PROMPT.shape[1] :].tolist()))
    assert seen.keys() <= distribution.keys()
    statistic, freedom = chi_square([seen[pair] for pair in distribution], list(distribution.values()))
    assert freedom > 3
    assert statistic < chi2.isf(ERROR_PROBABILITY, freedom)


def test_the_same_torch_seed_gives_the_same_text(pair, trees):
    def sampled():
        torch.manual_seed(3)
        return pair[1].generate(PROMPT, do_sample=True, max_new_tokens=8, custom_generate=trees, pad_token_id=0)

    assert torch.equal(sampled(), sampled())


def test_a_streamer_gets_the_text(pair):
    _, model, words, head = pair
    streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=60)
    trees = Trees(head, "2x4", "rrs-wo", streamer=streamer)
    out = model.generate(PROMPT, max_new_tokens=8, custom_generate=trees, pad_token_id=0)
    assert "".join(streamer) == words.decode(out[0, PROMPT.shape[1] :])


@pytest.mark.parametrize(
    "name, options",
    {
        "num_beams": {"num_beams": 2},
        "output_scores": {"output_scores": True, "return_dict_in_generate": True},
        "guidance_scale": {"guidance_scale": 2.0},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    }.items(),
)
def test_what_trees_cannot_do_is_refused_by_name(pair, trees, name, options):
    with complains(name):
        pair[1].generate(PROMPT, custom_generate=trees, max_new_tokens=3, pad_token_id=0, **options)


def test_other_refusals_are_by_name_too(pair, trees):
    _, model, _, head = pair
    cache = model(PROMPT, use_cache=True).past_key_values
    with complains("past_key_values"):
        model.generate(
            torch.cat([PROMPT, PROMPT], 1),
            past_key_values=cache,
            custom_generate=trees,
            pad_token_id=0,
            max_new_tokens=3,
        )
    with complains("the prompt has 512 tokens"):
        model.generate(PROMPT[:, :1].expand(1, 512), max_new_tokens=1, custom_generate=trees, pad_token_id=0)
    with complains("both head= and drafter="):
        Trees(head, drafter="suffix")
