"""What is fitted to a head along a text: its calibration, a draft vocabulary, and a static tree.

The text is that of `--text`, or without it the target's own answers.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treespec.api.calibrate import Row, calibrate
from treespec.api.spec import Spec
from treespec.draft.auto.measure import load_or_measure_cost
from treespec.draft.calibration import CALIBRATION_FILE, save_calibration
from treespec.draft.heads.loading import draft_steps, roll_out_drafts
from treespec.draft.vocabulary import find_most_frequent, save_vocabulary
from treespec.errors import InputError
from treespec.eval.common import ProgressStep, Report, ignore_report
from treespec.eval.config import CalibrateConfig, TreeConfig
from treespec.eval.texts import Passage, iterate_passages, load_models
from treespec.files.atomic import write_text
from treespec.sampling.probs import SamplingParams, compute_probs, select_topk
from treespec.trees.most_likely import build_most_likely_tree, estimate_length
from treespec.trees.sequoia import build_sequoia_tree
from treespec.trees.static import StaticTree, format_tree

MAX_TIMED_NODES = 128  # most nodes of a tree whose size follows from times
MAX_FITTED_RANKS = 10  # most children of a node


def calibrate_head(
    config: CalibrateConfig, report: Report = ignore_report
) -> tuple[Path, float | None]:
    """Write HEAD/calibration.json; returns its path and the coverage of a new draft vocabulary.

    Raises InputError for a head that is no directory, and for text that cannot be read or is too
    short.
    """
    # 1. The file.
    file = Path(config.head) / CALIBRATION_FILE
    coverage = None
    if not file.parent.is_dir():
        raise InputError(f"--head {config.head} is no directory: its calibration is written there")

    # 2. The draft vocabulary. It comes first: the head takes its rows when it is loaded.
    if config.draft_vocab:
        spec = load_models(config, None, file, report)
        passages = iterate_passages(replace(config, limit=None), spec, report)
        counted = [passage.tokens[passage.counts] for passage in passages]
        tokens, coverage = find_most_frequent(counted, config.draft_vocab, spec.target)
        save_vocabulary(tokens, coverage, config.head)

    # 3. The calibration.
    spec = load_models(config, config.head, file, report)
    rows = list(iterate_feature_rows(spec, iterate_passages(config, spec, report)))
    report(ProgressStep(1, 1, "calibrating"))
    assert spec.head
    fitted = calibrate(spec.head, spec.target, rows, config.depth, config.positions)
    save_calibration(fitted, config.head)
    return file, coverage


def make_tree(
    config: TreeConfig, report: Report = ignore_report
) -> tuple[StaticTree, Tensor, float]:
    """Write the tree to OUT; returns it, the accuracies [D, R] and the τ that they predict.

    Raises InputError for files and models that cannot be used, for text that is too short, and for
    a head that is never right on it.
    """
    # 1. The accuracies.
    spec = load_models(config, config.head, config.out, report)
    rows = iterate_feature_rows(spec, iterate_passages(config, spec, report))
    table = measure_accuracies(spec, rows, config.depth, MAX_FITTED_RANKS, config.temperature)
    if not bool(table[0].any()):
        raise InputError(
            f"the head {config.head} is never right on this text: no tree is worth its nodes"
        )

    # 2. The best tree of the kind and size; without a size the fastest by the times measured here.
    rates = table.mean(0).numpy()
    depth = len(table)
    if config.kind == "medusa":
        tree = build_most_likely_tree(table.tolist(), config.nodes)
    elif config.nodes:
        tree = build_sequoia_tree(rates, config.nodes, depth)
    else:
        assert spec.proposer
        cost = load_or_measure_cost(spec.target, spec.proposer)
        tree = cost.find_best_tree(np.array([rates, rates]), MAX_TIMED_NODES, depth)[0]
    write_text(config.out, format_tree(tree))
    return tree, table, estimate_length(tree, table.tolist())


def iterate_feature_rows(spec: Spec, passages: Iterable[Passage]) -> Iterator[Row]:
    """A passage's (tokens [T], counts [T], features [T, F]), on the features' device.

    The features are those that the head reads, and the state after the final norm.
    """
    assert spec.head
    for passage in passages:
        features = spec.target.compute_features(
            passage.tokens[None], spec.head.aux_layers, last=True
        )[0]
        yield passage.tokens.to(features.device), passage.counts.to(features.device), features


@torch.no_grad()
def measure_accuracies(
    spec: Spec, rows: Iterable[Row], depth: int, ranks: int, temperature: float = 0.0
) -> Tensor:
    """[D, R] float64: the target's mean probability of the head's r-th most likely token at step d.

    Steps and ranks count from 0. At temperature 0 it is the share of positions at which that token
    is the target's choice. D: `depth`, or less if the head drafts less. R: `ranks`, or V if that is
    less. rows: texts with their features (see `Row`). Raises InputError if they are too short.
    """
    head = spec.head
    target = spec.target
    assert head
    depth = draft_steps(head, depth)
    ranks = min(ranks, target.vocab_size)
    total = torch.zeros(depth, ranks, dtype=torch.float64)
    positions = 0
    for tokens, counts, features in rows:
        # 1. The target's probabilities of token t + 1 in row t, [T, V].
        inputs, last = target.split_features(features, head.aux_layers)
        p = compute_probs(target.compute_output_logits(last), SamplingParams(temperature))

        # 2. The positions whose first draft counts; draft step d from t is of token t + d + 2.
        starts = max(0, len(tokens) - depth - 1)
        chosen = counts[2 : 2 + starts].nonzero().squeeze(1)
        positions += len(chosen)
        for d, logits in enumerate(roll_out_drafts(head, target, tokens, inputs, depth)):
            top = select_topk(logits[chosen], ranks)[1]
            total[d] += p[chosen + d + 1].gather(1, top).sum(0).double().cpu()
    if not positions:
        raise InputError("the text is too short to measure a head on: give longer conversations")
    return total / positions
