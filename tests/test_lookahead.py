"""Jacobi and lookahead decoding: windows as they are drawn, guesses and pools against one-token forwards."""

import copy

import numpy as np
import pytest
import torch
from drafters import list_token_paths
from models import plain_generate, plain_logits, prompt, target

from treespec.api.spec import Spec
from treespec.draft.lookup.guess import Guess
from treespec.draft.lookup.jacobi import Jacobi
from treespec.draft.lookup.lookahead import Lookahead
from treespec.draft.lookup.one_hot import LookupRow, OneHotDrafter, TextDrafter
from treespec.draft.registry import JacobiOptions, LookaheadOptions
from treespec.engine.cycle import DraftedTrees, compute_argmax
from treespec.model.output import TreeOutput

TOKENS = 16


class Recorded(TextDrafter):
    """A drafter that notes the length of the text, its guess and its state in every cycle."""

    wants_argmax = True

    def __init__(self, drafter, cycles):
        self.drafter = drafter
        self.cycles = cycles

    def new(self):
        return Recorded(copy.deepcopy(self.drafter), self.cycles)

    def draft(self, text):
        guess = self.drafter.draft(text)
        self.cycles.append((len(text), guess, copy.deepcopy(self.drafter)))
        return guess

    def learn_argmax(self, argmax):
        self.drafter.learn_argmax(argmax)


def run(drafter, text):
    """The target's greedy tokens, and the cycles that `Recorded` noted."""
    cycles = []
    model = target("llama")
    output = Spec(model, Recorded(drafter, cycles), verifier="topk").generate(text, max_new_tokens=TOKENS)
    assert output.token_ids == plain_generate(model, text, TOKENS)
    assert len(cycles) == output.stats.cycles
    return [*text, *output.token_ids], cycles


def follow(tokens):
    """The target's most likely token after a sequence, by a forward of its own."""
    return int(plain_logits(target("llama").model, tokens)[-1].argmax())


def list_paths(guess):
    return [path[1:] for path in list_token_paths(guess.build_token_tree(0, torch.device("cpu")))]


def test_jacobi_guesses_are_those_of_its_drawing():
    r, a, b, c, d, x, y, z, e = range(10, 19)
    drafter = Jacobi(JacobiOptions(tokens=4))
    assert drafter.draft(np.array([5, r])).tokens == [r, r, r, r]
    drafter.guesses = [a, b, c, d]
    drafter.learn_argmax(np.array([a, x, y, z, e]))
    assert drafter.draft(np.array([5, r, a, x])) == Guess([y, z, e, x], range(4))


@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
def test_jacobi_guesses_are_iterations_of_one_token_forwards(tokens):
    """Those of whole texts reach their fixed point, the greedy text: then all the rest is accepted."""
    text, cycles = run(Jacobi(JacobiOptions(tokens)), prompt())
    guesses = {}
    for length, guess, _ in cycles:
        known = text[:length]
        wanted = [guesses.get(position, known[-1]) for position in range(length, length + tokens)]
        assert guess == Guess(wanted, range(tokens))
        guesses = {length + i: follow([*known, *wanted[:i]]) for i in range(tokens + 1)}
    assert len(cycles) <= TOKENS
    if tokens > 1:
        assert len(cycles) < TOKENS


def test_a_window_of_five_tokens_is_the_tree_of_its_drawing():
    r, a, a1, b, b1, b2, c, c1, c2 = range(10, 19)
    drafter = Lookahead(LookaheadOptions(window=3, ngram=3, guesses=4))
    drafter.window = [[0, a, a1], [b, b1, b2]]
    guess = drafter.draft(np.array([5, r]))
    assert set(list_paths(guess)) == {(), (a,), (a, a1), (b,), (a, b1), (a, a1, b2)}
    most_likely = {(b,): c, (a, b1): c1, (a, a1, b2): c2}
    drafter.learn_argmax(np.array([most_likely.get(path, 0) for path in list_paths(guess)]))
    assert drafter.pool == {r: [(b, c)], a: [(b1, c1)], a1: [(b2, c2)]}

    following = drafter.draft(np.array([5, r, a]))
    assert drafter.window == [[a, b1, b2], [c, c1, c2]]
    assert (b1, c1) in list_paths(following)  # the n-gram that begins with the new root; row 0 shares its b'
    assert len(following.tokens) == 5
    assert following.tokens[:2] == [b1, c1]


def compute_new_row(text, window):
    """[W] the most likely token after each token of the window's last row, a forward for each of them."""
    row = []
    for column in range(len(window[-1])):
        below = [tokens[column] for tokens in window[1:]]
        row.append(follow([*text, *window[0][1 : column + 1], *below]))
    return row


@pytest.mark.parametrize("window, ngram, guesses", [(4, 3, 2), (3, 4, 9), (5, 2, 1), (1, 2, 3)])
def test_the_pool_holds_what_one_token_forwards_say_follows(window, ngram, guesses):
    """Windows, pools, trees and the number of cycles are those of a decoder without trees."""
    drafter = Lookahead(LookaheadOptions(window, ngram, guesses))
    text, cycles = run(drafter, prompt(length=12))
    width = window + ngram - 2
    rows = [(prompt(length=12) * 9)[12 - width :][:width]]
    pool = {}
    length = 12
    for noted_length, guess, noted in cycles:
        # 1. The tree: the n-grams of the pool that begin with the root, and the window.
        assert noted_length == length
        known = text[:length]
        rows[0][0] = known[-1]
        assert noted.window == rows
        assert noted.pool == pool
        paths = {tuple(rows[0][1 : column + 1]) for column in range(len(rows[0]))}
        for row in range(1, len(rows)):
            for column in range(len(rows[0])):
                paths.add((*rows[0][1 : column + 1], *[tokens[column] for tokens in rows[1 : row + 1]]))
        for ngram_rest in pool.get(known[-1], []):
            paths |= {ngram_rest[:end] for end in range(ngram)}
        assert sorted(list_paths(guess)) == sorted(paths)

        # 2. The longest path that the target goes accepts its tokens.
        accepted = max(len(path) for path in paths if list(path) == text[length : length + len(path)])
        new_row = compute_new_row(known, rows)
        rows = [*rows, new_row]
        if len(rows) < ngram:
            rows = [tokens[1:] for tokens in rows]
        else:
            for first, *others in zip(*rows, strict=True):
                kept = [tokens for tokens in pool.get(first, []) if tokens != tuple(others)]
                pool[first] = [*kept, tuple(others)][-guesses:]
            rows = rows[1:]
        length += 1 + accepted
    assert length >= len(text)
    assert len(cycles) < TOKENS


def test_only_drafters_that_ask_hear_of_the_target():
    """A tree that lost nodes, and a row that was not asked for a guess, teach nothing; NaN is a token."""
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [torch.nan, 0.0, 0.0]])
    outputs = [TreeOutput(logits[:2], logits[:2]), TreeOutput(logits, logits)]
    whole, cut = compute_argmax(DraftedTrees([], {1: [0, 1]}), outputs)
    assert whole.tolist() == [1, 0]
    assert cut is None
    _, tokens = compute_argmax(DraftedTrees([], {}), outputs)
    assert tokens.tolist() == [1, 0, 2]

    heard = []

    class Hearing(TextDrafter):
        def draft(self, text):
            return Guess()

        def learn_argmax(self, argmax):
            heard.append(argmax.tolist())

    drafter = OneHotDrafter(Hearing())
    drafter.states = [LookupRow(Hearing(), np.array([1]), guess_nodes) for guess_nodes in (2, 3, 0)]
    drafter.learn_argmax([None, torch.arange(5), torch.arange(2)])
    assert heard == [[2, 3, 4]]  # below two forced tokens
    assert not drafter.wants_argmax
    model = target("llama")
    Spec(model, Hearing(), verifier="topk").generate(prompt(), max_new_tokens=4)
    assert len(heard) == 1
