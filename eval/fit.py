"""Fit a head's calibration, its draft vocabulary and a static tree to a text.

The text is `--text`, or without it the target's own answers.
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

MAX_TIMED_NODES = 128  # largest tree when its size is chosen by measured times
MAX_FITTED_RANKS = 10  # largest number of children of a node


def calibrate_head(
    config: CalibrateConfig, report: Report = ignore_report
) -> tuple[Path, float | None]:
    """Calibrate a head: write HEAD/calibration.json, and with `--draft-vocab` a draft vocabulary.

    Returns:
        The path of calibration.json, and the share of the text's tokens that the new draft vocabulary covers; None
        without a new one.

    Raises:
        InputError: the head is no directory, or the text cannot be read or is too short.
    """
    # 1. The file.
    file = Path(config.head) / CALIBRATION_FILE
    coverage = None
    if not file.parent.is_dir():
        raise InputError(f"--head {config.head} is no directory: its calibration is written there")

    # 2. The draft vocabulary, before the head is loaded: loading prunes the head's output to it.
    if config.draft_vocab:
        spec = load_models(config, None, file, report)
        passages = iterate_passages(replace(config, limit=None), spec, report)
        counted_tokens = [passage.tokens[passage.counts] for passage in passages]
        tokens, coverage = find_most_frequent(counted_tokens, config.draft_vocab, spec.target)
        save_vocabulary(tokens, coverage, config.head)

    # 3. The calibration.
    spec = load_models(config, config.head, file, report)
    rows = list(iterate_feature_rows(spec, iterate_passages(config, spec, report)))
    report(ProgressStep(1, 1, "calibrating"))
    assert spec.head
    calibration = calibrate(spec.head, spec.target, rows, config.depth, config.positions)
    save_calibration(calibration, config.head)
    return file, coverage


def make_tree(
    config: TreeConfig, report: Report = ignore_report
) -> tuple[StaticTree, Tensor, float]:
    """Fit a static tree to a head's accuracies and write it to OUT.

    Returns:
        The tree, the accuracies [D, R] of `measure_accuracies`, and the τ that they predict for the tree.

    Raises:
        InputError: files or models cannot be used, the text is too short, or the head is never right on it.
    """
    # 1. The accuracies.
    spec = load_models(config, config.head, config.out, report)
    rows = iterate_feature_rows(spec, iterate_passages(config, spec, report))
    accuracies = measure_accuracies(spec, rows, config.depth, MAX_FITTED_RANKS, config.temperature)
    if not bool(accuracies[0].any()):
        raise InputError(
            f"the head {config.head} is never right on this text: no tree is worth its nodes"
        )

    # 2. The best tree of the kind and size; with `--nodes 0` the fastest one by times measured on this machine.
    rates = accuracies.mean(0).numpy()
    depth = len(accuracies)
    if config.kind == "medusa":
        tree = build_most_likely_tree(accuracies.tolist(), config.nodes)
    elif config.nodes:
        tree = build_sequoia_tree(rates, config.nodes, depth)
    else:
        assert spec.proposer
        cost = load_or_measure_cost(spec.target, spec.proposer)
        tree = cost.find_best_tree(np.array([rates, rates]), MAX_TIMED_NODES, depth)[0]
    write_text(config.out, format_tree(tree))
    return tree, accuracies, estimate_length(tree, accuracies.tolist())


def iterate_feature_rows(spec: Spec, passages: Iterable[Passage]) -> Iterator[Row]:
    """Yield each passage's (tokens [T], counts [T], features [T, F]) on the target's device.

    The features are the hidden states that the head reads, then the state after the final norm.
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
    """Measure the target's mean probability of the head's r-th most likely token at draft step d.

    At temperature 0 it is the share of positions at which that token is the target's choice. Draft step d from
    position t is of token t + d + 2, here t = 1:

        token      a    b    c    d    e
        draft                     0    1        step 0 drafts d after a b c, step 1 drafts e

    Args:
        spec: the target and the head.
        rows: texts with their features (see `Row`).
        depth: number of draft steps D; less if the head drafts fewer.
        ranks: number of ranks R; less if V is.
        temperature: the target's; 0.0 is greedy.

    Returns:
        [D, R] float64; steps and ranks count from 0.

    Raises:
        InputError: the texts are too short.
    """
    head = spec.head
    target = spec.target
    assert head
    depth = draft_steps(head, depth)
    ranks = min(ranks, target.vocab_size)
    total = torch.zeros(depth, ranks, dtype=torch.float64, device="cpu")
    positions = 0
    for tokens, counts, features in rows:
        # 1. The target's probabilities of token t + 1 in row t, [T, V].
        inputs, last = target.split_features(features, head.aux_layers)
        p = compute_probs(target.compute_output_logits(last), SamplingParams(temperature))

        # 2. The positions whose first draft counts.
        max_starts = max(0, len(tokens) - depth - 1)
        start_positions = counts[2 : 2 + max_starts].nonzero().squeeze(1)
        positions += len(start_positions)
        for d, logits in enumerate(roll_out_drafts(head, target, tokens, inputs, depth)):
            top_tokens = select_topk(logits[start_positions], ranks)[1]
            total[d] += p[start_positions + d + 1].gather(1, top_tokens).sum(0).double().cpu()
    if not positions:
        raise InputError("the text is too short to measure a head on: give longer conversations")
    return total / positions
