"""Drafts of another vocabulary: shared tokens by their bytes, and texts that keep the target's law."""

import pytest
import torch
import transformers as hf
from equality import close, seeded
from growing import contents, joined, level_logits, same
from models import GROUPED, as_undrafted, random_model, save_model, tokenizer
from other_words import sentence_piece, without_shared_tokens
from refusals import complains
from tokenizers import Tokenizer
from tokenizers.models import BPE

from treespec import load
from treespec.api.spec import Spec
from treespec.draft.models.model import OtherVocabulary
from treespec.draft.models.other_vocabulary import (
    SPECIAL,
    SharedVocabulary,
    bytes_of,
    shared_vocabulary,
    start_of,
)
from treespec.model.target import Target


def model_of(words, seed=5, **changes):
    sizes = {"vocab_size": len(words), "max_position_embeddings": 256, "num_hidden_layers": 2}
    return Target(random_model(hf.LlamaConfig(**GROUPED | sizes | changes), seed), words)


@pytest.fixture(scope="module")
def pair():
    """A byte-level target, and a draft model of SentencePiece's form."""
    target = model_of(tokenizer(), seed=0)
    draft = model_of(sentence_piece())
    words = shared_vocabulary(target.tokenizer, draft.tokenizer, target.vocab_size, draft.vocab_size)
    return target, OtherVocabulary(draft, target, words)


def test_both_forms_give_the_bytes_of_their_text():
    text = "the user's\n\tanswer: zürich \N{SNOWMAN} 12"
    for words in (tokenizer(), sentence_piece()):
        table = bytes_of(words)
        ids = words.encode(text, add_special_tokens=False)
        assert b"".join(table[number] for number in ids).decode() == text


def test_shared_tokens_stand_for_the_same_text(pair):
    target, draft = pair
    ours = bytes_of(target.tokenizer)
    theirs = bytes_of(draft.model.tokenizer)
    words = draft.words
    assert words.target.tolist() == sorted(words.target.tolist())
    assert [ours[n] for n in words.target.tolist()] == [theirs[n] for n in words.draft.tolist()]
    missing = set(ours) - set(words.target.tolist())
    assert not {ours[n] for n in missing} & set(theirs.values())
    assert 0.5 < words.share < 1


def test_special_tokens_are_shared_by_name_alone(pair):
    target, draft = pair
    shared = set(draft.words.target.tolist())
    assert target.tokenizer.convert_tokens_to_ids("<pad>") in shared
    assert target.tokenizer.convert_tokens_to_ids("</s>") not in shared  # the other's is <eos>
    text = shared_vocabulary(tokenizer(), sentence_piece(specials=("</s", "<bos>", "<eos>", "<pad>")), 999, 999)
    assert all(
        not value.startswith(SPECIAL + b"</s") for value in (bytes_of(tokenizer())[n] for n in text.target.tolist())
    )


@pytest.mark.parametrize("text", ["the unhappy question", "zürich \N{SNOWMAN}\n", "<s>user: 12</s>"])
def test_other_tokens_are_spelled_by_their_bytes(pair, text):
    target, draft = pair
    table = bytes_of(draft.model.tokenizer)
    ids = target.tokenizer.encode(text)
    spelled = [number for token in ids for number in draft.words.spelled(token)]
    assert b"".join(table[number] for number in spelled).decode() == text


def test_of_equal_bytes_the_token_that_is_no_byte_counts():
    draft = sentence_piece()
    words = shared_vocabulary(tokenizer(), draft, 999, 999)
    by_token = dict(zip(words.target.tolist(), words.draft.tolist(), strict=True))
    a = tokenizer().convert_tokens_to_ids("a")
    assert draft.convert_ids_to_tokens(by_token[a]) == "a"


def test_so_it_does_in_the_target():
    """A target that says the token `a` must not be drafted the byte <0x61>."""
    vocab = {"<0x61>": 0, "<0x62>": 1, "a": 2}  # bytes first, as Llama 2 has them
    target = hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab, [], byte_fallback=True)))
    assert shared_vocabulary(target, tokenizer(), 999, 999).target.tolist() == [1, 2]


def test_no_shared_token_is_one_line(tmp_path):
    with complains("share no token"):
        shared_vocabulary(tokenizer(), without_shared_tokens(), 999, 999)
    target = save_model(tmp_path / "target")
    draft = save_model(tmp_path / "draft")
    without_shared_tokens().save_pretrained(draft)
    with complains(r"cannot draft for this target: the two vocabularies share no token"):
        load(str(target), drafter=f"model:{draft}")


def test_logits_are_the_models_own_after_the_same_text(pair):
    target, draft = pair
    cache, together = joined(target, draft)
    before = contents(cache)
    for _ in range(2):
        for text, path, logits in level_logits(together, cache):
            tokens = [*start_of(draft.model.tokenizer)]
            tokens += [n for token in text for n in draft.words.spelled(token)]
            tokens += draft.words.draft[list(path)].tolist()
            alone = draft.model.model(torch.tensor([tokens])).logits[0, -1][draft.words.draft]
            close(logits, alone, 2e-4, 2e-4)
    assert same(before, contents(cache))


def test_a_text_of_the_targets_start_alone_may_follow_another(pair):
    _, draft = pair
    one = draft.new()
    one.skipped = frozenset({1})  # as a tokenizer that begins every text with <s>
    first = one.begin(torch.tensor([1]))[0]
    one.rewind([0])
    close(one.begin(torch.tensor([1]))[0], first, 1e-5)


def test_a_model_with_the_targets_weights_is_accepted_where_it_can_be(pair):
    """A vocabulary in another order shares all tokens, and drafts what the target says."""
    target, _ = pair
    order = torch.randperm(target.vocab_size, generator=seeded(0))
    model = random_model(hf.LlamaConfig(**target.config.to_dict()), 0)
    model.load_state_dict(target.model.state_dict())
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight.copy_(weight[order])
    place = {int(old): new for new, old in enumerate(order)}
    by_bytes = {text: place[number] for number, text in bytes_of(target.tokenizer).items()}
    every = torch.arange(target.vocab_size)
    draft = torch.tensor([place[number] for number in every.tolist()])
    words = SharedVocabulary(every, draft, bytes_of(target.tokenizer), by_bytes)
    spec = Spec(target, OtherVocabulary(Target(model, target.tokenizer), target, words), "chain:4", "single")
    for temperature in (0.0, 1.0):
        stats = spec.generate("the user", max_new_tokens=20, temperature=temperature, seed=1).stats
        assert stats.acceptance_length == 5


def test_the_command_names_the_share(tmp_path, caplog):
    target = save_model(tmp_path / "target")
    draft = tmp_path / "draft"
    words = sentence_piece()
    save_model(draft, vocab_size=len(words), num_hidden_layers=1)
    words.save_pretrained(draft)
    spec = load(str(target), drafter=f"model:{draft}", dtype="float32")
    (line,) = [record.getMessage() for record in caplog.records if "another vocabulary" in record.getMessage()]
    assert "tokens that both have" in line
    as_undrafted(spec, ["the user"], 8)
