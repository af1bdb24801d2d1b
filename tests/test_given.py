"""Drafters without a model: what they find and learn of the target, that no token changes by them."""

from collections import Counter

import numpy as np
import pytest
import torch
from drafting import source_of
from models import plain_generate, prompt, target, what
from refusals import complains
from test_decode import prompts
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from treespec.api.spec import Spec
from treespec.cli.chat import ChatConfig, Conversation, run
from treespec.draft.model_free.guess import Guess
from treespec.draft.model_free.lookup import Lookup
from treespec.draft.model_free.matches import longest_match, tree_of
from treespec.draft.model_free.recycling import SHAPE, TOPK, Recycling
from treespec.draft.options import LookupOptions
from treespec.eval.certify.run import Examination
from treespec.eval.config import CertifyConfig
from treespec.model.target import TreeOutput
from treespec.verify.walk import answered

DRAFTERS = [
    "lookup",
    "lookup:tokens=3,ngram=2,matches=4",
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


def test_chat_says_what_drafts_and_refuses_a_tree():
    conversation = Conversation(spec_of("llama", "lookup"), ChatConfig(target="target", drafter="lookup:tokens=10"))
    assert run(conversation, "/verifier topk") == "lookup, verifier topk"
    with complains("makes its own tree"):
        run(conversation, "/tree eagle")


def test_a_drafter_without_a_head_is_certified():
    config = CertifyConfig(target="target", drafter="lookup", tokens=80, length=4, batch=1)
    found = Examination(spec_of("llama", "lookup"), [prompt(), prompt(5)], config).verdict()
    assert (found["passed"], found["tree"]) == (True, "lookup")


A, B, C, D, E = range(5)


def scored(*best):
    """The target's output where these are the most likely tokens after each node, best first."""
    logits = torch.zeros(len(best), TOPK)
    for row, tokens in zip(logits, best, strict=True):
        row[list(tokens)] = torch.arange(len(tokens), 0, -1).float()
    return TreeOutput(logits, torch.empty(0))


def test_until_a_token_is_scored_what_followed_it_stands_in_the_latest_first():
    drafter = Recycling()
    guess = drafter.draft(torch.tensor([A, B, D, A, C, D, A]).numpy())
    assert (guess.tokens[:2], guess.parents[:2]) == ([C, B], [0, 0])
    answered([drafter.update(Guess([C, B], [0, 0]), 0, scored((E,), (A,), (B,)))])
    assert [drafter.after[token][0] for token in (A, C, B)] == [E, A, B]
    assert len(drafter.after[A]) == TOPK


def test_the_shape_has_the_papers_size():
    assert len(SHAPE) == 79
    assert max(map(len, SHAPE)) <= 6
    assert max(map(max, SHAPE)) < TOPK
