"""A static tree for a target and head, from accuracies along given text or the target's own answers."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from treespec.draft.fit.calibrate import Row
from treespec.draft.fit.measure import times_for
from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Step
from treespec.eval.fit.accuracies import accuracies
from treespec.eval.fit.tree_config import TreeConfig
from treespec.eval.questions import load_questions
from treespec.eval.texts import content_of, texts_of
from treespec.files import check_writable, write_text
from treespec.spec import Spec, load
from treespec.trees.medusa import expected_length, measured
from treespec.trees.path_file import text_of
from treespec.trees.sequoia import best_shape, best_trees, sequoia
from treespec.trees.static import StaticTree

LARGEST = 128  # nodes, of trees whose size is chosen by times


def make_tree(
    config: TreeConfig, report: Callable[[Step], None] = lambda step: None
) -> tuple[StaticTree, Tensor, float]:
    """Writes the tree; returns it, the accuracies [D, R] and the acceptance length that they promise.

    Raises InputError for what cannot be used.
    """
    check_writable(config.out)
    if config.text:
        content_of(config.text)
    report(Step(0, 1, f"loading {config.target} and {config.head}"))
    spec = load(
        config.target,
        config.head,
        template=config.template,
        device_map=config.device_map,
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )
    assert spec.head
    table = accuracies(
        spec.head,
        spec.target,
        rows_of(config, spec, report),
        config.depth,
        config.ranks,
        config.temperature,
    )
    if not bool(table[0].any()):
        raise InputError(
            f"the head {config.head} is never right on this text: no tree is worth its nodes"
        )
    tree = shaped(config, spec, table)
    write_text(config.out, text_of(tree))
    return tree, table, expected_length(tree, table)


def shaped(config: TreeConfig, spec: Spec, table: Tensor) -> StaticTree:
    """The tree of a kind and size. table: [D, R] accuracies."""
    if config.kind == "medusa":
        return measured(table, config.nodes)
    rates, depth = table.mean(0), len(table)
    if config.nodes:
        return sequoia(rates, config.nodes, depth)
    assert spec.proposer
    times = times_for(spec.target, spec.proposer)
    best = best_trees(rates, LARGEST, depth)
    nodes, depth, _ = best_shape(
        best, torch.from_numpy(times.forward(LARGEST)), times.begin, times.step
    )
    return best.tree(nodes, depth)


def rows_of(config: TreeConfig, spec: Spec, report: Callable[[Step], None]) -> Iterator[Row]:
    """Tokens [T], which of them count [T], and features [T, F] of each text."""
    what = AcceptanceConfig(
        out=config.out,
        target=config.target,
        head=config.head,
        text=config.text,
        limit=config.limit,
        max_new_tokens=config.max_new_tokens,
        answers_temperature=config.temperature,
        seed=config.seed,
        template=config.template,
    )
    questions = [] if config.text else load_questions(config.questions)[0][: config.limit]
    assert spec.head
    for text in texts_of(what, spec, questions, report):
        features = spec.target.features(text.tokens[None], spec.head.taps, last=True)[0]
        yield text.tokens.to(features.device), text.counts.to(features.device), features
