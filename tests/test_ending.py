"""The text of an answer as it streams: complete, in order, and cut at the exact token."""

import random
from typing import ClassVar

import pytest
from commands import complains
from tokenizers import decoders, normalizers
from training import sentence_piece, tokenizer

from treespec.errors import TooLong
from treespec.text.ending import Ending
from treespec.text.strings import INCOMPLETE_CHARACTER, check_fits_context, count_suffix_overlap

NEVER = frozenset[int]()
TEXTS = [
    "the user asks, and the assistant answers: the question!",
    "naïve café — “quoted” 我们在路上 👩‍👩‍👧 🇨🇭 done",
    "  two  spaces\n\n\tand a tab \n",
    "do n't stop . It 's , we 've ?",
    "raw \x1b]0;title\x07 and \x1b[31mred \u202eturned",
    "",
]


def sentencepiece():
    """As Llama 2's: words begin with ▁, unknown characters fall back to bytes, decoding drops the first space."""
    words = sentence_piece()
    model = words.backend_tokenizer
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), model.normalizer])
    model.decoder = decoders.Sequence([model.decoder, decoders.Strip(" ", 1, 0)])
    return words


TOKENIZERS = {"byte-level": tokenizer, "sentencepiece": sentencepiece}


def decode(words, ids):
    return words.decode(ids, skip_special_tokens=True)


def grouped(ids, rng):
    """The ids in cycles of 1 to 6 tokens."""
    while ids:
        n = rng.randint(1, 6)
        yield ids[:n]
        ids = ids[n:]


def streamed(words, ids, rng, stop=()):
    """(ids kept, pieces)"""
    ending = Ending(words, NEVER, stop, len(ids))
    taken = [ending.take(cycle) for cycle in grouped(ids, rng)]
    return [token for kept, _ in taken for token in kept], [text for _, text in taken]


def by_definition(words, ids, stop, least):
    """(ids kept, text): decode every prefix as a whole, end at the first whose last token completes a stop string."""
    before = 0
    for n in range(1, len(ids) + 1):
        text = decode(words, ids[:n])
        certain = text if n == len(ids) else text.rstrip(INCOMPLETE_CHARACTER)
        ends = range(before + 1, len(certain) + 1)
        starts = [end - len(s) for s in stop for end in ends if certain[:end].endswith(s)]
        if starts and n >= least:
            return ids[:n], certain[: min(starts)]
        before = len(certain)
    return ids, decode(words, ids)


class Pieces:
    """A tokenizer of five tokens, whose texts are simply joined."""

    added_tokens_decoder: ClassVar[dict] = {}

    def decode(self, tokens, **options):
        return "".join(["Hel", "lo", " <", "st", "op>"][token] for token in tokens)


def test_what_may_become_a_stop_string_is_held_back():
    ending = Ending(Pieces(), NEVER, ["<stop>"], 10)
    assert [ending.take([token])[1] for token in range(5)] == ["Hel", "lo", " ", "", ""]
    assert ending.stopped
    assert count_suffix_overlap("ab<st", "<stop>") == 3


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_decoded_text(name, text):
    words = TOKENIZERS[name]()
    rng = random.Random(0)
    ids = words.encode(text, add_special_tokens=False)
    for _ in range(20):
        # special tokens anywhere: they have no text, and take none from their neighbours
        mixed = list(ids)
        for _ in range(rng.randint(0, 4)):
            mixed.insert(rng.randint(0, len(mixed)), words.bos_token_id)
        if decode(words, mixed).count(INCOMPLETE_CHARACTER):
            continue  # one of them split a character
        kept, pieces = streamed(words, mixed, rng)
        assert kept == mixed
        assert "".join(pieces) == decode(words, mixed)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_too_long_only_where_its_tokens_are_too_many(name):
    words = TOKENIZERS[name]()
    rng = random.Random(4)
    for text in [*TEXTS, *("".join(rng.choices("the user我 \n", k=99)) for _ in range(20))]:
        tokens = len(words.encode(text, add_special_tokens=False))
        assert check_fits_context(text, words, tokens) == text
    with pytest.raises(TooLong, match="has 90000 characters"):
        check_fits_context("the user " * 10_000, words, 100)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_incomplete_character_is_held_back(name):
    words = TOKENIZERS[name]()
    for text in ("a我b", "我们", "👩‍👩‍👧 🇨🇭"):
        ids = words.encode(text, add_special_tokens=False)
        assert len(ids) > len(text)  # characters of several tokens
        ending = Ending(words, NEVER, (), 100)
        pieces = [ending.take([token])[1] for token in ids]
        assert not any(INCOMPLETE_CHARACTER in piece for piece in pieces)
        assert "".join(pieces) == text


def test_what_stays_incomplete_is_shown_at_the_end():
    words = tokenizer()
    ids = words.encode("a我")[:-1]
    assert streamed(words, ids, random.Random(0))[1][-1].endswith(INCOMPLETE_CHARACTER)
    half = Ending(words, frozenset([2]), (), 100)
    assert half.take([*ids, 2, 5]) == ([*ids, 2], decode(words, ids))


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("least", [0, 12])
def test_stop_strings_among_random_bytes_cut_as_by_definition(name, least):
    """And text is held back only as far as a stop string may begin with it. Two letters make overlaps frequent."""
    words = TOKENIZERS[name]()
    rng = random.Random(3)
    letters = [words.encode(letter, add_special_tokens=False)[-1] for letter in "ab"]
    for number in range(400):
        ids = rng.choices(letters if number % 2 else [*range(3, 12), 200, 201, 202], k=30)
        text = decode(words, ids)
        starts = [rng.randrange(len(text)) for _ in range(3)]
        stop = tuple(text[at : at + rng.randint(1, 9)] for at in starts)
        stop = (*stop[:2], stop[2] + "b")
        ending = Ending(words, NEVER, stop, 30, least)
        kept = []
        shown = ""
        for cycle in grouped(ids, rng):
            new, piece = ending.take(cycle)
            kept = kept + new
            shown = shown + piece
            if not ending.finished:
                said = decode(words, kept).rstrip(INCOMPLETE_CHARACTER)
                held = [n for s in stop for n in range(1, len(s)) if said.endswith(s[:n])]
                assert shown == said[: len(said) - max(held, default=0)]
        assert (kept, shown) == by_definition(words, ids, stop, least)


def test_a_stop_string_is_found_in_a_token_with_half_a_character():
    words = tokenizer()
    words.add_tokens(["!\N{LATIN SMALL LETTER A WITH CIRCUMFLEX}"])  # decodes to "!" and the byte E2
    until = [*words.encode("ask"), len(words) - 1]
    kept, pieces = streamed(words, until + words.encode("question"), random.Random(0), ("!",))
    assert (kept, "".join(pieces)) == (until, "ask")


def test_a_stop_string_that_is_a_special_token_ends_the_text():
    words = tokenizer()
    ids = words.encode("question</s> more")
    end = ids.index(2) + 1
    kept, pieces = streamed(words, ids, random.Random(0), ("</s>",))
    assert kept == ids[:end]
    assert "".join(pieces) == "question"


@pytest.mark.parametrize("words", [tokenizer(), None], ids=["tokenizer", "no tokenizer"])
@pytest.mark.parametrize("limit", [0, 1, 7, 100])
def test_tokens_past_the_end_are_not_returned(words, limit):
    ids = [5, 6, 2, 9, 8, 7, 2, 5, 6, 6]
    for eos, end in ((NEVER, len(ids)), (frozenset([2]), 3), (frozenset([9, 7]), 4)):
        for seed in range(10):
            ending = Ending(words, eos, (), limit)
            taken = [ending.take(cycle) for cycle in grouped(ids, random.Random(seed))]
            assert [token for kept, _ in taken for token in kept] == ids[: min(end, limit)]
            assert not ending.finished or ending.take(ids) == ([], "")


def test_spaces_before_punctuation_are_kept_where_a_tokenizer_would_clean_them_up():
    words = tokenizer()
    words.clean_up_tokenization_spaces = True
    text = "it 's so , is n't it ?"
    assert "".join(streamed(words, words.encode(text), random.Random(0))[1]) == text


@pytest.mark.parametrize(
    "words, stop, reason",
    [
        (tokenizer(), ("a", ""), "16 strings at most, each of 1 to 1000"),
        (tokenizer(), ("a" * 1001,), "each of 1 to 1000 characters"),
        (tokenizer(), ("a",) * 17, "16 strings at most"),
        (None, ("a",), "no tokenizer"),
    ],
)
def test_stop_strings_that_cannot_be_found_are_refused(words, stop, reason):
    with complains(reason):
        Ending(words, NEVER, stop, 10)
