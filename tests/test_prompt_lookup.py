"""Prompt lookup drafts what transformers' drafts."""

import numpy as np
import pytest
import torch

from treespec.draft.lookup.prompt_lookup import PromptLookup
from treespec.draft.registry import PromptLookupOptions


def draft(text, tokens, ngram):
    options = PromptLookupOptions(prompt_lookup_num_tokens=tokens, max_matching_ngram_size=ngram)
    guess = PromptLookup(options).draft(np.array(text))
    assert list(guess.parents) == list(range(len(guess.tokens)))
    return guess.tokens


@pytest.mark.parametrize("tokens, ngram", [(1, 1), (3, 2), (10, 2), (4, 5), (50, 99)])
def test_it_drafts_what_transformers_drafts(tokens, ngram):
    generators = pytest.importorskip("transformers.generation.candidate_generator")
    theirs = generators.PromptLookupCandidateGenerator(None, tokens, ngram, max_length=999)
    lengths = set()
    for seed in range(60):
        random = np.random.default_rng(seed)
        text = random.integers(random.integers(2, 9), size=random.integers(1, 40)).tolist()
        candidates, _ = theirs.get_candidates(torch.tensor([text]))
        drafted = list(draft(text, tokens, ngram))
        assert drafted == candidates[0, len(text) :].tolist()
        lengths.add(len(drafted))
    assert {0, tokens if tokens < 20 else 20} <= lengths


def test_the_drawn_example():
    """As `treespec.draft.lookup.prompt_lookup` draws it."""
    a, b, c, d, e = range(5)
    assert draft([a, b, c, d, a, b, e, a, b], tokens=3, ngram=2) == [c, d, a]
