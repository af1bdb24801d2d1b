"""Drafters without a model: what they find, that no token changes by them, and what they do not go with."""

from collections import Counter

import numpy as np
import pytest
import torch
from drafting import source_of
from models import plain_generate, prompt, target, what
from refusals import complains, says
from test_decode import prompts
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from treespec.api.spec import Spec
from treespec.cli.chat import ChatConfig, Conversation, run
from treespec.draft.model_free.lookup import Lookup
from treespec.draft.model_free.matches import longest_match, tree_of
from treespec.draft.options import LookupOptions
from treespec.eval.certify.run import Examination
from treespec.eval.config import CertifyConfig

DRAFTERS = [
    "lookup",
    "lookup:tokens=3,ngram=2,matches=4",
    "jacobi:window=4",
    "lookahead",
    "lookahead:window=3,ngram=3,guesses=2",
    "lookahead:window=4,ngram=2",
    "lookahead:window=1,ngram=2",
]


def spec_of(name, drafter, **options):
    model = target(name) if isinstance(name, str) else name
    return Spec(model, source_of(drafter, model), **{"verifier": "topk", **options})


def random_text(seed, length=40, vocab=4):
    return np.random.default_rng(seed).integers(vocab, size=length)


def paths_of(tree):
    """The tokens from the root to each node."""
    return [tuple(tree.tokens[tree.ancestors[node]].tolist()) for node in range(len(tree.tokens))]


def merged(root, continuations, nodes):
    return tree_of(continuations, nodes - 1).tree(root, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(8))
def test_it_keeps_the_heaviest_beginnings_and_their_parents(seed):
    """Against a count of all beginnings; ties may go either way."""
    g = np.random.default_rng(seed)
    lengths = g.integers(5, size=30)
    lines = [g.integers(3, size=length).tolist() for length in lengths]
    total: Counter = Counter()
    for line in lines:
        total.update(tuple(line[:end]) for end in range(1, len(line) + 1))
    tree = merged(7, [line + [-1] * (4 - len(line)) for line in lines], nodes=12)
    kept = [path[1:] for path in paths_of(tree)]
    assert len(set(kept)) == 12
    assert sum(total[path] for path in kept) == sum(sorted(total.values())[-11:])
    assert (tree.parents[1:] < torch.arange(1, 12)).all()
    assert tree.depth.tolist() == [len(path) - 1 for path in paths_of(tree)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ngram", [1, 3, 6])
def test_it_finds_what_a_search_of_all_places_finds(seed, ngram):
    text = random_text(seed).tolist()
    for size in range(ngram, 0, -1):
        ends = [end for end in range(size - 1, len(text) - 1) if text[end - size + 1 : end + 1] == text[-size:]]
        if ends:
            break
    assert longest_match(np.array(text), np.array(text), ngram)[1].tolist() == [end + 1 for end in ends]


@pytest.mark.parametrize("seed", range(10))
def test_one_match_is_transformers_prompt_lookup(seed):
    text = random_text(seed, vocab=6)
    theirs = PromptLookupCandidateGenerator(num_output_tokens=5, max_matching_ngram_size=3, max_length=1000)
    wanted = theirs.get_candidates(torch.from_numpy(text)[None])[0][0, len(text) :].tolist()
    guess = Lookup(LookupOptions(tokens=5)).draft(text)
    assert guess.tokens == wanted
    assert guess.parents == list(range(len(wanted)))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_batch_equals_each_text_alone(drafter):
    """Accepted numbers too: what a drafter knows of a text is of that text."""
    spec, options = spec_of("llama", drafter), {"max_new_tokens": 16, "temperature": 0.7}
    texts = prompts((7, 40, 1, 19))
    alone = [spec_of("llama", drafter).generate(text, seed=5 + i, **options) for i, text in enumerate(texts)]
    assert what(spec.generate(texts, batch=3, seed=5, **options)) == what(alone)
    assert what([spec.generate(texts[1], seed=6, **options)]) == what(alone[1:2])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_later_turn_and_the_end_of_the_context_change_nothing(drafter):
    spec = spec_of("gpt2", drafter)
    first = spec.generate(prompt(), max_new_tokens=12).token_ids
    longer = [*prompt(), *first, *prompt(length=5, seed=9)]
    second = spec.generate(longer, max_new_tokens=12)
    assert second.token_ids == plain_generate(spec.target, longer, 12)
    assert second.stats.cached_tokens >= len(prompt()) + len(first) - 2
    full = prompt(length=120)
    assert spec.generate(full, max_new_tokens=50).token_ids == plain_generate(spec.target, full, 8)


@pytest.mark.parametrize(
    "drafter, complaint",
    {
        "lookup:tokens=0": "--drafter lookup:tokens=0: tokens is 0, must be a whole number from 1 to 4,095",
        "lookup:words=3": "'words=3' is not understood; its options are tokens=10, ngram=3, matches=1",
        "lookahead:ngram=1": "ngram is 1, must be a whole number from 2 to 64",
        "jacobi:window": "'window' is not understood; its options are window=15",
        "lookout": "unknown drafter 'lookout' (did you mean lookup?): choose head:HEAD, ",
        "rest:nowhere": "no datastore at nowhere",
        "suffix:tokens=99999999": "tokens is 99999999, must be a whole number from 0 to 1,000,000",
        "suffix:tokens=5000,memory": "'memory' is not understood; its options are tokens=200000, longest=64",
        "sparse:512,h2o": "'h2o' is not",
        "sparse:4": "at least 8",
        "sparse:32,window=32": "at least 64",
    }.items(),
)
def test_a_drafter_that_there_is_not_is_one_line(drafter, complaint):
    with says(complaint):
        source_of(drafter, target("llama"))


def test_chat_says_what_drafts_and_refuses_a_tree():
    conversation = Conversation(spec_of("llama", "lookup"), ChatConfig(target="target", drafter="lookup:tokens=10"))
    assert run(conversation, "/verifier topk") == "lookup, verifier topk"
    with complains("makes its own tree"):
        run(conversation, "/tree eagle")


def test_a_drafter_without_a_head_is_certified():
    config = CertifyConfig(target="target", drafter="lookup", tokens=80, length=4, batch=1)
    found = Examination(spec_of("llama", "lookup"), [prompt(), prompt(5)], config).verdict()
    assert (found["passed"], found["tree"]) == (True, "lookup")
