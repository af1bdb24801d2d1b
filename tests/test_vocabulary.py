"""A head's tokens: those of the vocabulary that it drafts, and those by which it knows its target's tokenizer."""

import json

import pytest
import torch
import transformers as hf
from commands import complains
from models import (
    COMMON,
    CONFIGS,
    as_undrafted,
    close,
    draft_tree,
    follow,
    randn,
    random_head,
    random_model,
    seeded,
    target,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from training import save_model
from transformers import PhiConfig

from treespec.api.calibrate import iterate_choices, iterate_draft_steps
from treespec.api.load import load
from treespec.api.spec import Spec
from treespec.draft.auto.cost import CycleCost
from treespec.draft.heads.loading import (
    SAMPLE_TOKENS,
    TARGET_TOKENS_FIELD,
    add_sample_tokens,
    build_new_head,
    load_trained_head,
)
from treespec.draft.vocabulary import (
    DRAFT_VOCABULARY_FILE,
    find_most_frequent,
    load_vocabulary,
    restrict,
    save_vocabulary,
)
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target
from treespec.sampling.probs import SamplingParams

TIMES = CycleCost((1, 8, 64), (1.0, 1.0, 1.2), 0.01)
PROMPT = [5, 9, 33, 12, 7]


@pytest.fixture(scope="module")
def half():
    """A target of 64 tokens and a head that drafts 32 of them."""
    model = target("llama")
    head = random_head(model)
    restrict(head, model, torch.randperm(64, generator=seeded(1))[:32].sort().values)
    return model, head


@pytest.mark.parametrize(
    "verifier, tree",
    [("topk", "dynamic:depth=3,topk=40,nodes=60"), ("topk", "40x1"), ("rrs-wo", "eagle"), ("topk", "auto")],
)
def test_greedy_text_is_the_targets_token_for_token(half, verifier, tree):
    """Two of the trees ask for more children than there are tokens to draft."""
    model, head = half
    spec = Spec(model, head, tree, verifier, times=TIMES)
    (out,) = as_undrafted(spec, [PROMPT], 24)
    assert sum(out.stats.drafted) > 24


def test_a_calibration_counts_only_tokens_that_are_drafted(half):
    """One of the 5 is chosen where the target's choice is among them."""
    model, _ = half
    head = random_head(model)
    restrict(head, model, torch.arange(10, 15))
    text = torch.randint(64, (40,), generator=seeded(5))
    known = model.compute_features(text[None])[0]
    row = (text, torch.ones(40, dtype=torch.bool), known)
    ((_, hit, _),) = iterate_choices(iterate_draft_steps(head, model, [row], 1, 40))
    chosen = model.compute_output_logits(known).argmax(-1)[1:39:2]
    assert hit.sum(-1).tolist() == ((chosen >= 10) & (chosen < 15)).tolist()


@pytest.mark.parametrize("name", [*CONFIGS, "phi-with-a-bias"])
def test_rows_of_the_output_embedding_give_the_logits_of_their_tokens(name):
    """With the model's own scales, softcap and bias: to 1e-5."""
    model = Target(random_model(PhiConfig(**COMMON))) if "bias" in name else target(name)
    if "bias" in name:
        nn.init.normal_(model.model.lm_head.bias)
    hidden = randn(2, 3, model.feature_width, generator=seeded(7))
    tokens = torch.tensor([0, 3, 17, 63])
    own = model.compute_output_logits(hidden, model.copy_output_rows(tokens))
    close(own, model.compute_output_logits(hidden)[..., tokens], 1e-5)


def test_an_output_embedding_that_is_not_there_is_refused():
    model = Target(random_model(CONFIGS["llama"]()))
    model.model.lm_head.weight = nn.Parameter(model.model.lm_head.weight.to("meta"))
    with complains("offloaded"):
        restrict(random_head(target("llama")), model, torch.arange(4))
    model.model.lm_head = nn.Identity()
    with complains("no linear layer"):
        restrict(random_head(target("llama")), model, torch.arange(4))


def test_the_most_frequent_tokens_and_the_ends_are_kept():
    model = target("llama")
    texts = [torch.tensor([9, 9, 9, 40, 40]), torch.tensor([9, 30, 31, 32])]
    tokens, coverage = find_most_frequent(texts, 4, model)
    assert tokens.tolist() == [2, 9, 30, 40]  # 2 ends a text; of 30, 31 and 32 the lowest
    assert coverage == pytest.approx(7 / 9)
    for number in (0, 64):
        with complains(f"--draft-vocab is {number}"):
            find_most_frequent(texts, number, model)


def test_a_vocabulary_is_read_as_it_was_saved(tmp_path):
    assert load_vocabulary(tmp_path, 64) is None
    save_vocabulary(torch.tensor([2, 9, 63]), 0.75, tmp_path)
    assert load_vocabulary(tmp_path, 64).tolist() == [2, 9, 63]
    assert json.loads((tmp_path / DRAFT_VOCABULARY_FILE).read_text())["coverage"] == 0.75
    assert [file.name for file in tmp_path.iterdir()] == [DRAFT_VOCABULARY_FILE]


@pytest.mark.parametrize(
    "content, complaint",
    {
        '{"tokens": []}': "ascending order, from 0 to 63",
        '{"tokens": [3, 64]}': "ascending order, from 0 to 63",
        '{"tokens": [-1, 3]}': "ascending order, from 0 to 63",
        '{"tokens": [4, 3]}': "ascending order, from 0 to 63",
        '{"tokens": [3, 3]}': "ascending order, from 0 to 63",
        '{"tokens": [3, 4.0]}': "not understood",
        '{"tokens": 3}': "not understood",
        "[3, 4]": "is damaged",
    }.items(),
)
def test_a_file_that_is_no_vocabulary_is_refused_in_one_line(tmp_path, content, complaint):
    (tmp_path / DRAFT_VOCABULARY_FILE).write_text(content)
    with complains(complaint) as error:
        load_vocabulary(tmp_path, 64)
    assert DRAFT_VOCABULARY_FILE in str(error.value)


def test_a_head_is_loaded_with_its_vocabulary_and_packed_with_it(tmp_path):
    model = str(save_model(tmp_path / "model"))
    save_head(build_new_head("eagle", Target.load(model)), tmp_path / "head")
    save_vocabulary(torch.arange(100, 150), 0.5, tmp_path / "head")
    spec = load(model, f"{tmp_path}/head", "eagle", "rrs-wo", dtype="bfloat16")
    assert type(spec.head.output) is not nn.Linear
    assert spec.head.output.out_features == 50
    drafter = spec.decoder.drafter
    follow(drafter, randn(4, 32).to(spec.target.dtype), torch.tensor([5, 6, 7, 8]))
    tree = draft_tree(drafter, torch.tensor([8]), SamplingParams(1.0), seeded(0))
    assert set(tree.tokens[1:].tolist()) <= set(range(100, 150))
    assert len(spec.generate("the question", temperature=1.0, max_new_tokens=8, seed=0).token_ids) == 8


SIZE = 320


def words(start, size=SIZE):
    """A tokenizer of `size` words, w{start} and on."""
    model = WordLevel({f"w{start + number}": number for number in range(size)}, unk_token=f"w{start}")
    return hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("tokens")
    save_model(home / "target", vocab_size=SIZE)
    words(0).save_pretrained(home / "target")
    target = Target.load(f"{home}/target", dtype="float32")
    head = build_new_head("eagle", target)
    save_head(head, home / "older")
    head.config = add_sample_tokens(head.config, target)
    save_head(head, home / "head")
    return home


def target_with(home, tokenizer):
    target = Target.load(f"{home}/target", dtype="float32")
    target.tokenizer = tokenizer
    return target


def test_a_vocabulary_names_its_tokens_and_loads_for_its_target(home):
    stored = json.loads((home / "head" / "config.json").read_text())[TARGET_TOKENS_FIELD]
    assert len(stored) == SAMPLE_TOKENS
    assert max(map(int, stored)) >= SIZE * (SAMPLE_TOKENS - 1) // SAMPLE_TOKENS
    assert stored["20"] == "w20"
    assert load_trained_head(f"{home}/head", target_with(home, words(0))).config[TARGET_TOKENS_FIELD] == stored


def test_another_tokenizer_of_the_same_size_is_refused_in_one_line(home):
    with complains(r"token 0 is 'w0', this target's is 'w1000': .* another tokenizer$"):
        load_trained_head(f"{home}/head", target_with(home, words(1000)))
    with complains("this target's does not exist"):  # far fewer tokens
        load_trained_head(f"{home}/head", target_with(home, words(0, 100)))


def test_other_tokens_older_heads_and_targets_without_tokenizer_are_no_error(home):
    """As of a target that was tuned further, with names of its own for a third of its tokens."""
    tuned = words(0, 220)
    tuned.add_tokens([f"<{number}>" for number in range(100)])
    load_trained_head(f"{home}/head", target_with(home, tuned))
    load_trained_head(f"{home}/head", target_with(home, None))
    load_trained_head(f"{home}/older", target_with(home, words(1000)))
