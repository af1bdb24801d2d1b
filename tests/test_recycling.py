"""Token Recycling: the tree is what the target held likely after each token where it stood last."""

import torch

from treespec.draft.model_free.guess import Guess
from treespec.draft.model_free.recycling import SHAPE, TOPK, Recycling
from treespec.model.target import TreeOutput
from treespec.verify.walk import answered

A, B, C, D, E = range(5)


def scored(*best):
    """The target's output where these are the most likely tokens after each node, best first."""
    logits = torch.zeros(len(best), TOPK)
    for row, tokens in zip(logits, best, strict=True):
        row[list(tokens)] = torch.arange(len(tokens), 0, -1).float()
    return TreeOutput(logits, torch.empty(0), logits[:0])


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
