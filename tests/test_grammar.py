"""Answers by a grammar: valid, with the target's distribution among what is allowed, forced tokens for free."""

import itertools
import math
from functools import partial

import pytest
import torch
from drafters import source_of
from models import TableConfig, TableModel, random_head, zeros
from reference import deviation, enumerate_decoding
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from treespec.api.spec import Spec
from treespec.model.target import Target
from treespec.sampling.compiled_grammar import compile_grammar
from treespec.sampling.grammar import GrammarProcessor
from treespec.sampling.probs import SamplingParams, compute_probs
from treespec.verify.facts import VERIFIER_NAMES

TOKENS = ["a", "b", "c", "ab", "</s>", "d"]
END = 4


def letters_tokenizer():
    words = Tokenizer(BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("a", "b")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_special_tokens(["</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")


def letters_spec():
    model = Target(TableModel(TableConfig(len(TOKENS), seed=1, eos_token_id=END)), letters_tokenizer())
    return Spec(model, random_head(model, seed=2))


def by_words(words):
    """The tokens by which an answer stays the beginning of one of the words."""

    def allowed(answer):
        text = "".join(TOKENS[token] for token in answer)
        following = {i for i, token in enumerate(TOKENS) if any(word.startswith(text + token) for word in words)}
        return following | ({END} if text in words else set())

    return allowed


def law_of_answers(model, prompt, allowed, params):
    """{answer: probability}: forbidden tokens have none, and the rest are scaled to 1, token by token."""
    distributions: dict[tuple[int, ...], float] = {}

    def walk(answer, chance):
        if answer and answer[-1] == END:
            distributions[answer] = chance
            return
        logits = model.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].double()
        forbidden = [token for token in range(len(TOKENS)) if token not in allowed(answer)]
        logits[forbidden] = -math.inf
        for token, p in enumerate(compute_probs(logits, params).tolist()):
            if p:
                walk((*answer, token), chance * p)

    walk((), 1.0)
    return distributions


PROMPT = [0, 2, 1]
WORDS = {x + y + z for x in ("ab", "c") for y in ("", "b", "bb") for z in ("", "a")}  # of REGEX
REGEX = "(ab|c)b{0,2}a?"
FORCED = "(a|b)cabcab(c|ab)b"  # after its first token, c ab c ab must follow
TREES = [("rrs-wo", "2x2"), ("traversal", "2x2"), ("block", "chain:3"), ("topk", "dynamic:depth=2,topk=3,nodes=6")]
CYCLES_OF_WORDS = {"rrs-wo": 1.846215, "traversal": 1.846215, "block": 1.731576, "topk": 1.846215}
CYCLES_OF_FORCED = {"rrs-wo": 2.394666, "traversal": 2.394666, "block": 2.083453, "topk": 2.394666}


@pytest.fixture(scope="module")
def letters():
    return letters_spec()


def shaper_of(spec, regex):
    target = spec.target
    return GrammarProcessor(compile_grammar("regex", regex, target.tokenizer, target.vocab_size, frozenset({END})))


def allowed_by_matcher(spec, regex, answer):
    """By a matcher that goes straight to the end of the answer."""
    rows = shaper_of(spec, regex).process_logits(answer, [()], zeros(1, len(TOKENS)))
    return set((rows[0] == 0).nonzero()[:, 0].tolist())


def test_masks_do_not_depend_on_the_way_to_a_node(letters):
    """One matcher walks a tree, others go straight to each node, and one goes on from a longer answer."""
    paths = [path for n in range(5) for path in itertools.product([0, 1, 2, 3], repeat=n)][::-1]
    walked = shaper_of(letters, FORCED)
    for answer in ([], [0, 2]):
        rows = walked.process_logits(answer, paths, zeros(len(paths), len(TOKENS)))
        for path, row in zip(paths, rows, strict=True):
            alone = shaper_of(letters, FORCED).process_logits([], [(*answer, *path)], zeros(1, len(TOKENS)))
            assert torch.equal(row, alone[0])


@pytest.mark.parametrize("verifier, tree", TREES)
@pytest.mark.parametrize("regex, cycles", [(REGEX, CYCLES_OF_WORDS), (FORCED, CYCLES_OF_FORCED)])
def test_answers_have_the_targets_distribution_among_what_is_allowed(letters, verifier, tree, regex, cycles):
    """By enumeration; the mean number of cycles is frozen."""
    spec = letters.configured(tree, verifier)
    params = SamplingParams(2.0, top_k=2)
    allowed = by_words(WORDS) if regex == REGEX else partial(allowed_by_matcher, letters, regex)
    wanted = law_of_answers(spec.target, PROMPT, allowed, params)
    texts, mean = enumerate_decoding(spec, PROMPT, temperature=2.0, top_k=2, regex=regex).distribution()
    assert deviation(texts, wanted) < 1e-6
    assert mean == pytest.approx(cycles[verifier], abs=1e-4)


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
def test_at_temperature_0_every_verifier_gives_the_most_likely_allowed_tokens(letters, verifier):
    spec = letters.configured(verifier=verifier, allow_lossy=True)
    for regex in (REGEX, FORCED):
        wanted = letters.baseline().generate(PROMPT, regex=regex).token_ids
        assert spec.generate(PROMPT, regex=regex).token_ids == wanted


@pytest.mark.parametrize("verifier", VERIFIER_NAMES)
def test_forced_tokens_are_accepted_by_every_verifier(letters, verifier):
    """After the first token four are forced: one cycle takes them, whatever the head drafts."""
    spec = letters.configured(verifier=verifier, allow_lossy=True)
    for seed in range(3):
        stats = spec.generate(PROMPT, regex="(a|b)cabcab", temperature=1.0, seed=seed).stats
        assert stats.new_tokens == 6
        assert stats.cycles <= 2


@pytest.mark.parametrize("drafter", ["suffix:tokens=0", "jacobi:3", "lookahead:window=3,ngram=3"])
def test_drafters_without_a_model_draft_below_forced_tokens(letters, drafter):
    spec = Spec(letters.target, source_of(drafter, letters.target), verifier="topk")
    answers = spec.generate([PROMPT, [2, 0, 3, 0, 3]], regex=f"({FORCED}){{3}}")
    for prompt, answer in zip([PROMPT, [2, 0, 3, 0, 3]], answers, strict=True):
        wanted = letters.baseline().generate(prompt, regex=f"({FORCED}){{3}}")
        assert answer.token_ids == wanted.token_ids
        assert answer.stats.cycles <= 10 < wanted.stats.cycles


def test_an_answer_without_a_choice_takes_one_cycle(letters):
    answer = letters.generate(PROMPT, regex="cabbcab")
    assert answer.text == "cabbcab"
    assert answer.stats.cycles == 1
    assert sum(answer.stats.drafted) == answer.stats.new_tokens  # and nothing below its end
    assert letters.baseline().generate(PROMPT, regex="cabbcab").stats.cycles == answer.stats.new_tokens


def test_an_answer_ends_with_its_grammar_and_says_if_cut(letters):
    whole = letters.generate(PROMPT, regex="(ab){3}c")
    assert whole.text == "abababc"
    assert whole.token_ids[-1] == END
    assert not whole.stats.truncated
    part = letters.generate(PROMPT, regex="(ab){3}c", max_new_tokens=2)
    assert part.text == "abab"
    assert part.stats.truncated
