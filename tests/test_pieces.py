"""A text that is tokenised in pieces has the tokens of the whole text, and can be ended between two pieces."""

import random

import pytest
import transformers as hf
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from treespec.files.pauses import pausing
from treespec.text.pieces import encode_text

PIECE = 300
LLAMA3 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "with a space before": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "llama-3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "single digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "no words": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
}
PARTS = [
    "the user asks ",
    *("don't ", "12345678 ", "    ", "\n\n", "\t", "naïve été ", "\N{PARTY POPPER}" * 2, "日本語の文 "),
    *("</s>", "<s> ", "if x:\n    return y[3]\n", "e\N{COMBINING ACUTE ACCENT}a", "....!!!", "\r\n"),
    *("a" * 90, "7" * 40, " " * 50),
]  # fmt: skip


def build_tokenizer(split, normalizer=None):
    model = Tokenizer(BPE())
    model.pre_tokenizer = split
    if normalizer:
        model.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([" ".join(PARTS) * 3], trainer)
    model.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")


def random_text(seed):
    chance = random.Random(seed)
    return "".join(chance.choice(PARTS) * chance.choice([1, 1, 2]) for _ in range(chance.randrange(100, 400)))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr("treespec.text.pieces.PIECE_CHARACTERS", PIECE)
    monkeypatch.setattr("treespec.text.pieces.OVERLAP_CHARACTERS", PIECE // 3)


@pytest.mark.parametrize("name", SPLITS)
def test_the_tokens_are_those_of_the_whole_text(name):
    words = build_tokenizer(SPLITS[name])
    for seed in range(25):
        text = random_text(seed)
        for special in (True, False):
            whole = words.encode(text, add_special_tokens=special, verbose=False)
            assert encode_text(words, text, special) == whole


def test_a_normalizer_that_changes_lengths_changes_nothing():
    words = build_tokenizer(SPLITS["gpt-2"], normalizers.NFC())
    for seed in range(25):
        text = random_text(seed)
        assert encode_text(words, text) == words.encode(text, verbose=False)


def test_a_long_text_pauses_once_a_piece_and_can_be_ended_there():
    words = build_tokenizer(SPLITS["gpt-2"])
    text = "the user asks don't 12345 " * 200
    pauses = []

    def end():
        pauses.append(1)
        if len(pauses) == 5:
            raise InterruptedError

    with pausing(end), pytest.raises(InterruptedError):
        encode_text(words, text)
    pauses.append(1)
    with pausing(lambda: pauses.append(1)):
        encode_text(words, text)
    assert len(pauses) > len(text) // PIECE
