"""A head tells some tokens of the target that it was trained for, and another tokenizer is noticed by them."""

import json

import pytest
import transformers as hf
from models import save_model
from refusals import complains
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from treespec.draft.trained.kinds import FEW, FIELD, new_head, trained_head, with_tokens
from treespec.heads.checkpoint import save_head
from treespec.model.target import Target

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
    head = new_head("eagle", target)
    save_head(head, home / "older")
    head.config = with_tokens(head.config, target)
    save_head(head, home / "head")
    return home


def target_with(home, tokenizer):
    target = Target.load(f"{home}/target", dtype="float32")
    target.tokenizer = tokenizer
    return target


def test_it_names_tokens_over_the_whole_vocabulary_and_loads_for_its_own_target(home):
    stored = json.loads((home / "head" / "config.json").read_text())[FIELD]
    assert len(stored) == FEW
    assert max(map(int, stored)) >= SIZE * (FEW - 1) // FEW
    assert stored["20"] == "w20"
    assert trained_head(f"{home}/head", target_with(home, words(0))).config[FIELD] == stored


def test_another_tokenizer_of_the_same_size_is_refused_in_one_line(home):
    with complains(r"token 0 is 'w0', this target's is 'w1000': .* another tokenizer$"):
        trained_head(f"{home}/head", target_with(home, words(1000)))
    with complains("this target's does not exist"):  # far fewer tokens
        trained_head(f"{home}/head", target_with(home, words(0, 100)))


def test_some_other_tokens_an_older_head_and_a_target_without_tokenizer_are_no_error(home):
    """As of a target that was tuned further, with names of its own for a third of its tokens."""
    tuned = words(0, 220)
    tuned.add_tokens([f"<{number}>" for number in range(100)])
    trained_head(f"{home}/head", target_with(home, tuned))
    trained_head(f"{home}/head", target_with(home, None))
    trained_head(f"{home}/older", target_with(home, words(1000)))
