"""The two stages of EAGLE-4: its layer is trained as an EAGLE-3.1 head, then its low-rank head for the layer's states.

    stage   trains                          the rest        learns
    1       layer, norms, fc, output rows   not there yet   the target's distribution, over all tokens
    2       the low-rank head               frozen          the layer's own distribution, at every depth

The low-rank head begins as the truncated SVD of the output rows, as published, or, with `--first-weights fitted`, as
the one that is best for the layer's states. `--from-head` of an EAGLE-3 head leaves the first stage out. The first
stage's head is in OUT/training/layer.
Facts are from the documentation of NeMo AutoModel (nightly of November 2026, `eagle4` and `draft_llama` of
`nemo_automodel.components.speculative.eagle`).
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from treespec.draft.heads.loading import TARGET_TOKENS_FIELD, draft_steps, iterate_states
from treespec.errors import InputError
from treespec.heads.checkpoint import load_head
from treespec.heads.eagle4 import NEW_CANDIDATES, NEW_RANK, NEW_WINDOW, Eagle4Head
from treespec.heads.head import Config, Head
from treespec.model.target import Target
from treespec.train.config import FIRST_STAGE_SHARE, TrainConfig
from treespec.train.data.prepare import Data
from treespec.train.record import Validation

MAX_MOMENT_STATES = 30_000  # there are H^2 moments
# The most likely tokens whose recall is measured: a tree seldom draws more children.
RECALLED_TOKENS = 8


def list_stages(config: TrainConfig) -> list[TrainConfig]:
    """List the runs that a training consists of: one, or before it the run of the first stage.

    The first stage takes `FIRST_STAGE_SHARE` of the steps or minutes; a number of epochs holds for each stage.
    """
    if not config.has_first_stage:
        return [config]
    window = NEW_WINDOW
    if config.sliding_window is not None:
        window = config.sliding_window
    draft_vocab = 0  # candidates are of all tokens
    if config.draft_vocab is not None:
        draft_vocab = config.draft_vocab
    changes: dict[str, Any] = {
        "head": config.training.first_stage,
        "out": config.first_head,
        "fc_norm": True,
        "norm_output": True,
        "sliding_window": window,
        "draft_vocab": draft_vocab,
        "candidate_rank": None,
        "candidates": None,
        "first_weights": None,
        "calibrate": False,
        "minutes": FIRST_STAGE_SHARE * config.minutes,
    }
    if config.max_steps:
        changes["max_steps"] = max(1, config.max_steps - config.count_stage_steps(config.max_steps))
    return [replace(config, **changes), config]


def build_candidate_fields(config: TrainConfig) -> Config:
    """Build the fields of a head's config.json for the second stage: those of the head that it begins with.

    Raises InputError for a head without an output layer, and for a rank that the options or the layer do not allow.
    """
    source = str(config.first_head)
    trained_head = load_head(source)
    if trained_head.lm_head is None:
        raise InputError(
            f"--from-head {source} has no output layer, and candidates get their logits from it: train one with "
            "--head eagle3"
        )
    given = dict(trained_head.config)
    sizes = given.pop("candidate_head", {})
    for name in (
        "architectures",
        "model_type",
        "checksum",
        "draft_vocab_size",
        TARGET_TOKENS_FIELD,
    ):
        given.pop(name, None)
    rank = choose_rank(config, trained_head, sizes.get("rank"))
    count = sizes.get("num_candidates", NEW_CANDIDATES)
    if config.candidates is not None:
        count = config.candidates
    absent = {"fc_norm": False, "norm_output": False, "layer_types": None, "sliding_window": None}
    count = min(count, trained_head.lm_head.out_features)
    return absent | given | {"candidate_head": {"rank": rank, "num_candidates": count}}


def choose_rank(config: TrainConfig, trained_head: Head, trained_rank: int | None) -> int:
    """Choose the rank of the low-rank head. trained_rank: of the head that the run begins with, if it has one.

    Raises InputError for another rank than that, and for one above the width of the states.
    """
    rank = config.candidate_rank
    width = trained_head.hidden_size
    if trained_rank is not None:
        if rank not in (None, trained_rank):
            raise InputError(f"--from-head brings rank {trained_rank}: leave --candidate-rank out")
        return trained_rank
    if rank is None:
        return min(NEW_RANK, width)
    if rank > width:
        raise InputError(f"--candidate-rank is {rank}, and the head's states have {width} numbers")
    return rank


def freeze_layer(head: Eagle4Head) -> None:
    """Freeze all weights but the low-rank head's, in place."""
    head.requires_grad_(False)
    for weight in head.candidate_weights:
        weight.requires_grad_(True)


def add_recall(
    result: Validation, head: Head, target: Target, rows: Iterable[Any], steps: int
) -> Validation:
    """Add the recall of a head's candidates to a validation. Arguments as for `measure_recall`."""
    recall, recall_of_few = measure_recall(head, target, rows, steps)
    return replace(result, recall=recall, recall_of_few=recall_of_few)


@torch.no_grad()
def measure_moments(head: Head, target: Target, data: Data, steps: int, seed: int) -> Tensor:
    """Measure [H, H] the mean of s s' over a head's states s in all draft steps, along answers drawn by `seed`."""
    moments = torch.zeros(head.hidden_size, head.hidden_size, dtype=torch.float64, device="cpu")
    count = 0
    for number in random.Random(seed).sample(range(len(data.train)), len(data.train)):
        example = data.train[number]
        features = data.features([number])
        inputs, _ = target.split_features(features, head.aux_layers)
        tokens = example.input_ids[None].to(features.device)
        counts = example.loss_mask[None, 2:].to(features.device)
        for states in head(tokens, inputs[:, :-2].float(), counts, steps, target.embed_tokens):
            moments += (states.float().T @ states.float()).double().cpu()
            count += len(states)
        if count >= MAX_MOMENT_STATES:
            break
    return moments / max(count, 1)


@torch.no_grad()
def measure_recall(
    head: Head, target: Target, rows: Iterable[Any], steps: int
) -> tuple[list[float], list[float]]:
    """Measure how often the candidates hold the tokens that are most likely by the head's whole output layer.

    Args:
        head: the head as it will be served.
        target: the target.
        rows: conversations, `ValidationRow`s.
        steps: the number of draft steps to measure.

    Returns:
        For each step the share of positions whose most likely token is a candidate, and the share of candidates among
        the `RECALLED_TOKENS` most likely tokens. Both are empty for a head that computes all logits.
    """
    steps = draft_steps(head, steps)
    sums = torch.zeros(steps, RECALLED_TOKENS, dtype=torch.float64, device="cpu")
    positions = 0
    for tokens, mask, features in rows:
        inputs, _ = target.split_features(features, head.aux_layers)
        if len(tokens) <= steps + 1:
            continue
        for step, states in enumerate(iterate_states(head, target, tokens, inputs, steps)):
            counted = mask[2 : 2 + len(states)].to(states.device)
            retrieved = head.find_retrieved(states[counted], RECALLED_TOKENS)
            if retrieved is None:
                return [], []
            sums[step, : retrieved.shape[-1]] += retrieved.double().sum(0).cpu()
        positions += int(counted.sum())
    shares = sums / max(positions, 1)
    return shares[:, 0].tolist(), shares.mean(-1).tolist()
