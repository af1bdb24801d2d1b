"""The rows that draft, drawn again for each conversation and batch; a function of the seed, so that a run can resume.

DFlash and its kin start blocks at some anchors of a conversation. P-EAGLE drafts each level from a share of the rows
that drafted the level above. Eight rows, two anchors, or a ratio of 0.7:

    level              1  2  3  4
    rows by anchors    2  2  2  2
    rows by ratio      8  6  4  3      8 · 0.7^(level - 1), rounded up
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treespec.heads.sampled_rows import SampledRows
from treespec.train.config import TrainConfig


class RowSampling(NamedTuple):
    """How the rows of a conversation are sampled.

    Attributes:
        levels: D, the number of levels.
        anchors: the most rows that start blocks; 0: all.
        ratio: the share of a level's rows that draft the next level.
        seed: the run's seed.
    """

    levels: int
    anchors: int = 0
    ratio: float = 1.0
    seed: int = 0


def choose_sampling(config: TrainConfig) -> RowSampling | None:
    """Choose how the rows that draft are sampled; None: all of them draft."""
    ratio = 1.0
    if config.down_sample_ratio is not None:
        ratio = config.down_sample_ratio
    if not config.anchors and ratio == 1:
        return None
    levels = config.hyperparameters.unrolled_steps
    return RowSampling(levels, config.anchors or 0, ratio, config.seed)


def draw_rows(
    loss_mask: Tensor, sampling: RowSampling, batch: int, conversation: int
) -> SampledRows:
    """Draw the rows of a conversation, out of those with a draft that counts.

    With anchors the same rows draft all levels. Otherwise the first level is drafted from every row.

    Args:
        loss_mask: [T] bool, true at the assistant's tokens.
        sampling: how they are sampled.
        batch: the number of the batch in the run.
        conversation: the number of the conversation.
    """
    # 1. A random order, in which rows with a draft that counts come first.
    wanted = loss_mask[2:]
    rows = len(wanted)
    seed = ((sampling.seed * 1_000_003 + batch) * 1_000_003 + conversation) % 2**63
    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.randperm(rows, generator=generator, device="cpu")
    drafted = F.pad(wanted, (0, sampling.levels - 1)).unfold(0, sampling.levels, 1)  # [R, D]
    counting = drafted.any(1)[order]
    order = torch.cat([order[counting], order[~counting]])
    count = int(counting.sum())

    # 2. The number of rows of each level.
    if sampling.anchors:
        sizes = [min(sampling.anchors, count)] * sampling.levels
    else:
        sizes = [rows]
        for level in range(1, sampling.levels):
            sizes.append(math.ceil(count * sampling.ratio**level))
    return SampledRows.from_sizes(
        order[None], torch.tensor(sizes, dtype=torch.int64, device="cpu")[:, None]
    )


def draw_batch(
    loss_masks: Sequence[Tensor], sampling: RowSampling, batch: int, conversations: Sequence[int]
) -> SampledRows:
    """Draw the rows of a batch's conversations. loss_masks: [T] bool of all conversations of the run."""
    samples = []
    for conversation in conversations:
        samples.append(draw_rows(loss_masks[conversation], sampling, batch, conversation))
    return SampledRows.stack(samples)
