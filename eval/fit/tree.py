"""A static tree for a target and head, from the head's accuracies along a text."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from treespec.api.spec import Spec
from treespec.draft.fit.calibrate import Row
from treespec.draft.fit.measure import times_for
from treespec.errors import InputError
from treespec.eval.acceptance.config import AcceptanceConfig
from treespec.eval.common import Step
from treespec.eval.fit.accuracies import accuracies
from treespec.eval.fit.features import rows_of
from treespec.eval.fit.tree_config import TreeConfig
from treespec.eval.loading import load_models
from treespec.eval.questions import load_questions
from treespec.files.atomic import check_writable, write_text
from treespec.text.plain import content_of
from treespec.trees.medusa import expected_length, measured
from treespec.trees.path_file import text_of
from treespec.trees.sequoia import best_shape, best_trees, sequoia
from treespec.trees.static import StaticTree

LARGEST = 128  # most nodes of a tree whose size follows from times


def make_tree(
    config: TreeConfig, report: Callable[[Step], None] = lambda step: None
) -> tuple[StaticTree, Tensor, float]:
    """Write the tree to OUT; returns it, the accuracies [D, R] and the τ that they predict.

    Raises InputError for files and models that cannot be used, for text that is too short, and for
    a head that is never right on it.
    """
    # 1. Models; files are checked before.
    check_writable(config.out)
    if config.text:
        content_of(config.text)
    report(Step(0, 1, f"loading {config.target} and {config.head}"))
    spec = load_models(config, config.head)
    assert spec.head

    # 2. Accuracies.
    rows = texts_with_features(config, spec, report)
    limits = (config.depth, config.ranks, config.temperature)
    table = accuracies(spec.head, spec.target, rows, *limits)
    if not bool(table[0].any()):
        raise InputError(
            f"the head {config.head} is never right on this text: no tree is worth its nodes"
        )

    # 3. The tree.
    tree = fitted_tree(config, spec, table)
    write_text(config.out, text_of(tree))
    return tree, table, expected_length(tree, table)


def fitted_tree(config: TreeConfig, spec: Spec, table: Tensor) -> StaticTree:
    """The best tree of the kind and size that `config` names. table: [D, R] accuracies.

    Without a size (sequoia only) it is the one that decodes fastest by the times measured here.
    """
    # 1. A given size.
    if config.kind == "medusa":
        return measured(table, config.nodes)
    rates, depth = table.mean(0), len(table)
    if config.nodes:
        return sequoia(rates, config.nodes, depth)

    # 2. The size and depth that decode fastest.
    assert spec.proposer
    times = times_for(spec.target, spec.proposer)
    best = best_trees(rates, LARGEST, depth)
    forward_times = torch.from_numpy(times.forward(LARGEST))
    nodes, depth, _ = best_shape(best, forward_times, times.begin, times.step)
    return best.tree(nodes, depth)


def texts_with_features(
    config: TreeConfig, spec: Spec, report: Callable[[Step], None]
) -> Iterator[Row]:
    """The texts to measure accuracies on: those of `--text`, or the target's own answers."""
    text = AcceptanceConfig(
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
    return rows_of(text, spec, questions, report)
