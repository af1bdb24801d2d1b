"""What a forward over a tree and a level of drafts cost: measured once for a device and a model,
kept in a file.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from treespec.draft.proposer import Proposer
from treespec.errors import InputError
from treespec.files.atomic import read_json
from treespec.model.processor import processor

if TYPE_CHECKING:
    from treespec.model.target import Target  # transformers comes with it

NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NODES_TOGETHER = (1, 2, 4, 8, 16, 32)  # of each of several texts
MOST_TEXTS = 64  # that are measured together
SMALL = 7  # nodes, root included, of a tree of two draws a node and two levels


@dataclass(frozen=True)
class Times:
    """Measured costs of a cycle's parts, in seconds: of one text, or of some number together.

    target: the target's forward over a tree of `nodes` nodes (of each text), for each entry of
    `nodes`.
    begin, step: the first level of drafts, and each further one with one node, of trees chosen
    level by level.
    fixed, single, drawn: both of these for trees whose shape is settled before drafting: of the
    likeliest tokens, of chains of draws, and of trees with several draws a node.
    row, drawn_row: each further node of a level that has children: of the likeliest, and of several
    draws.
    rest: verifying and committing, in a cycle without drafts, of the likeliest tokens, of chains of
    draws, and of trees with several draws a node and SMALL nodes.
    judged: each further node of such a tree.
    """

    nodes: tuple[int, ...]
    target: tuple[float, ...]
    begin: float
    step: float
    drawn: tuple[float, float]
    single: tuple[float, float]
    fixed: tuple[float, float] = (0.0, 0.0)
    row: float = 0.0
    drawn_row: float = 0.0
    rest: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    judged: float = 0.0

    def levels(self, draws: int | None) -> tuple[float, float]:
        """Seconds of the first level of drafts, and of each further level.

        draws: at a node; 0: the likeliest tokens are taken; None: they are, and the tree is chosen
        level by level.
        """
        if draws is None:
            return self.begin, self.step
        return (self.fixed, self.single, self.drawn)[min(draws, 2)]

    def drafting(self, levels: int, draws: int | None, inner: int = 0) -> float:
        """Seconds of the drafts. inner: nodes that have children."""
        begin, step = self.levels(draws)
        return begin + step * max(levels - 1, 0) + self.inner(draws) * max(inner - levels, 0)

    def inner(self, draws: int | None) -> float:
        """Seconds of each further node of a level that has children."""
        return self.drawn_row if draws and draws > 1 else self.row

    def resting(self, draws: int | None, nodes: int = SMALL) -> float:
        """Seconds beside the target's forward and the drafts, in a cycle with drafts."""
        return self.rest[1 + min(draws or 0, 2)] + self.further(draws) * (nodes - SMALL)

    def further(self, draws: int | None) -> float:
        """Seconds that each further node of the tree adds to `resting`."""
        return self.judged if draws and draws > 1 else 0.0

    def forward(self, most: int) -> np.ndarray:
        """[most] seconds of the target's forward over 1, 2, … nodes: no less for more, straight
        lines between.
        """
        known, at, n = (
            np.maximum.accumulate(self.target),
            np.array(self.nodes),
            np.arange(1, most + 1),
        )
        right = np.searchsorted(at, n).clip(1, len(at) - 1)
        slope = (known[right] - known[right - 1]) / (at[right] - at[right - 1])
        return known[right - 1] + slope * (n - at[right - 1])


TimesBy = Callable[[int], Times]  # the times of a cycle by the number of its texts


def alike(texts: int) -> int:
    """The number of texts that is measured in place of this one: the nearest power of two.

    texts       1   2   3   4   5   6   7 … 11   12 … 22   over 45
    measured    1   2   4   4   4   8   8         16        64
    """
    return min(1 << round(math.log2(texts)), MOST_TEXTS)


def kept_times(file: Path) -> Times | None:
    """The times of an earlier run; None for a file that is missing, damaged or not understood."""
    try:
        fields = read_json(file, "it is measured again")
        nodes = tuple(fields["nodes"])
        if nodes not in (NODES[: len(nodes)], NODES_TOGETHER[: len(nodes)]) or len(nodes) < 2:
            return None
        return Times(
            nodes=nodes,
            target=seconds(fields["target"], len(nodes)),
            begin=seconds([fields["begin"]], 1)[0],
            step=seconds([fields["step"]], 1)[0],
            drawn=cast(tuple[float, float], seconds(fields["drawn"], 2)),
            single=cast(tuple[float, float], seconds(fields["single"], 2)),
            fixed=cast(tuple[float, float], seconds(fields["fixed"], 2)),
            row=seconds([fields["row"]], 1)[0],
            drawn_row=seconds([fields["drawn_row"]], 1)[0],
            rest=cast(tuple[float, float, float, float], seconds(fields["rest"], 4)),
            judged=seconds([fields["judged"]], 1)[0],
        )
    except (InputError, LookupError, TypeError, ValueError):
        return None


def seconds(values: Sequence[float], count: int) -> tuple[float, ...]:
    """`count` finite times that are not negative. Raises ValueError for anything else."""
    found = tuple(map(float, values))
    if len(found) != count or not all(0 <= value < math.inf for value in found):
        raise ValueError("no such times")
    return found


def key(target: "Target", proposer: Proposer | None, texts: int = 1) -> str:
    """A digest of everything that the times depend on: device (a processor with its features),
    threads, versions, target and draft model, and the number of texts.
    """
    device = target.output_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    model = target.config.to_json_string()
    parts = [str(device), name, torch.get_num_threads(), str(target.dtype), torch.__version__]
    parts += [target.layers, model, proposer.identity if proposer else None]
    parts += [texts] if texts > 1 else []  # files of one text keep their names
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]
