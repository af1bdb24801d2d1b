"""Lookahead's window rides in the target's forward: it sees its own line, and the tree does not see it."""

from dataclasses import replace

import pytest
import torch
from equality import close, seeded
from models import CONFIGS, VOCAB, target
from test_target import TOLERANCE, plain_logits, prefix, random_tree

from treespec.draft.model_free.lookahead import Lookahead, beside
from treespec.draft.options import LookaheadOptions
from treespec.model.target import TreeOutput
from treespec.verify.walk import answered


def with_rows(tree, seed=3, rows=3, width=4):
    window = torch.randint(3, VOCAB, (rows, width), generator=seeded(seed)).tolist()
    return replace(tree, rows=beside(len(tree.tokens), window))


@pytest.mark.parametrize("name", CONFIGS)
def test_extra_rows_change_nothing_of_the_tree_and_see_their_own_line(name):
    """Each asked row against a plain forward along the root and the rows that it sees, by depth."""
    model, tree, text = target(name), with_rows(random_tree()), prefix()
    caches = [model.new_cache(), model.new_cache()]
    for cache in caches:
        model.prefill(cache, text)
    out = model.forward_tree(caches[0], tree)
    without = model.forward_tree(caches[1], replace(tree, rows=None))
    close(out.logits, without.logits, 1e-5, 1e-5)
    close(out.features, without.features, 1e-5, 1e-5)
    assert not len(without.rows)
    tokens, depth, seen = tree.forwarded()
    assert len(out.rows) == tree.rows.asked == 4
    for i, logits in enumerate(out.rows):
        line = seen[len(tree.tokens) + i].nonzero().flatten()
        line = line[depth[line].argsort()]
        assert depth[line].tolist() == list(range(len(line)))
        alone = plain_logits(model.model, text[0].tolist() + tokens[line].tolist())[-1]
        close(logits, alone, TOLERANCE, TOLERANCE)
    kept = [0, 1, 5]
    for cache in caches:
        cache.commit([kept])
    following = [model.forward_tree(cache, random_tree(seed=7)).logits for cache in caches]
    close(*following, TOLERANCE, TOLERANCE)


def says(*tokens):
    """Logits whose most likely tokens are these."""
    return torch.nn.functional.one_hot(torch.tensor(tokens, dtype=torch.int64), VOCAB).float()


def cycle(drafter, root, *new):
    """A cycle at whose end the target says `new` behind the window's last row."""
    tree = drafter.draft(torch.tensor([root]).numpy())
    alone = len(drafter.window) == 1  # the first column's token is the root, a node
    out = TreeOutput(says(new[0], *[0] * (len(tree.tokens))), torch.empty(0), says(*new[alone:]))
    assert len(out.rows) == tree.rows.asked
    answered([drafter.update(tree, 0, out)])
    return tree


def test_the_window_fills_then_moves_on_and_its_columns_are_the_pool():
    """Tokens made in the same cycle have the same tens."""
    drafter = Lookahead(LookaheadOptions(window=3, ngram=3, guesses=2))
    cycle(drafter, 9, 11, 12, 13, 14)  # the first row is wider by the one that this step drops
    assert drafter.window == [[9, 9, 9], [12, 13, 14]]
    assert drafter.pool == {}
    cycle(drafter, 9, 22, 23, 24)
    assert drafter.window == [[12, 13, 14], [22, 23, 24]]
    assert list(drafter.pool[9]) == [(13, 23), (14, 24)]  # (12, 22) is one too many
    tree = cycle(drafter, 9, 32, 33, 34)
    assert tree.tokens == [14, 13, 24, 23]  # the latest first
    assert drafter.window == [[22, 23, 24], [32, 33, 34]]
    assert {first: list(known) for first, known in drafter.pool.items()} == {
        9: [(14, 24), (22, 32)],
        13: [(23, 33)],
        14: [(24, 34)],
    }
