"""Drafts found in the text: what is found, and that no token changes by them."""

from collections import Counter

import numpy as np
import pytest
import torch
from commands import complains
from drafters import build_spec, list_token_paths
from models import plain_generate, prompt, prompts_of_lengths, what

from treespec.cli.chat import ChatConfig, ChatSession, run_chat
from treespec.draft.lookup.matches import find_longest_match, merge_continuations
from treespec.eval.certify.run import Examination
from treespec.eval.config import CertifyConfig

DRAFTER = "suffix:tokens=0"


def random_text(seed, length=40, vocab=4):
    return np.random.default_rng(seed).integers(vocab, size=length)


def merged(root, continuations, nodes):
    return merge_continuations(continuations, nodes - 1, 0, lambda length: 1.0, 0.0).build_token_tree(
        root, torch.device("cpu")
    )


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
    kept = [path[1:] for path in list_token_paths(tree)]
    assert len(set(kept)) == 12
    assert sum(total[path] for path in kept) == sum(sorted(total.values())[-11:])
    assert (tree.parents[1:] < torch.arange(1, 12)).all()
    assert tree.depth.tolist() == [len(path) - 1 for path in list_token_paths(tree)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ngram", [1, 3, 6])
def test_it_finds_what_a_search_of_all_positions_finds(seed, ngram):
    text = random_text(seed).tolist()
    for size in range(ngram, 0, -1):
        ends = [end for end in range(size - 1, len(text) - 1) if text[end - size + 1 : end + 1] == text[-size:]]
        if ends:
            break
    assert find_longest_match(np.array(text), np.array(text), ngram)[1].tolist() == [end + 1 for end in ends]


@pytest.mark.parametrize("drafter", [DRAFTER, "jacobi:3", "lookahead:window=3,ngram=3,guesses=4"])
def test_a_batch_equals_each_text_alone(drafter):
    """Accepted numbers too: what a drafter knows of a text is of that text."""
    spec = build_spec("llama", drafter)
    options = {"max_new_tokens": 16, "temperature": 0.7}
    texts = prompts_of_lengths((7, 40, 1, 19))
    alone = [build_spec("llama", drafter).generate(text, seed=5 + i, **options) for i, text in enumerate(texts)]
    assert what(spec.generate(texts, batch=3, seed=5, **options)) == what(alone)
    assert what([spec.generate(texts[1], seed=6, **options)]) == what(alone[1:2])


def test_a_later_turn_and_the_end_of_the_context_change_nothing():
    spec = build_spec("gpt2", DRAFTER)
    first = spec.generate(prompt(), max_new_tokens=12).token_ids
    longer = [*prompt(), *first, *prompt(length=5, seed=9)]
    second = spec.generate(longer, max_new_tokens=12)
    assert second.token_ids == plain_generate(spec.target, longer, 12)
    assert second.stats.cached_tokens >= len(prompt()) + len(first) - 2
    full = prompt(length=120)
    assert spec.generate(full, max_new_tokens=50).token_ids == plain_generate(spec.target, full, 8)


def test_chat_says_what_drafts_and_refuses_a_tree():
    conversation = ChatSession(build_spec("llama", DRAFTER), ChatConfig(target="target", drafter=DRAFTER))
    assert run_chat(conversation, "/verifier topk") == "suffix, verifier topk"
    with complains("makes its own tree"):
        run_chat(conversation, "/tree eagle")


def test_a_drafter_without_a_head_is_certified():
    config = CertifyConfig(target="target", drafter=DRAFTER, tokens=80, length=4, batch=1)
    found = Examination(build_spec("llama", DRAFTER), [prompt(), prompt(5)], config).decide_verdict()
    assert (found["passed"], found["tree"]) == (True, DRAFTER)
