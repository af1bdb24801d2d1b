"""What a calibration sees of draft laws."""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.draft.calibration import RANKS, TOPS, TURNS, seen
from treespec.shaping.sampling import largest


def outline(q: Tensor) -> np.ndarray:
    """[F, J + 2] float64 on the host: all that the models see of the laws q [F, V].

    The J + 1 largest probabilities of each law, and the sum of its squares.
    """
    count = min(TOPS + 1, q.shape[-1])
    top = pad(largest(q, count)[0], (0, TOPS + 1 - count))
    return torch.cat([top, torch.linalg.vecdot(q, q)[:, None]], dim=1).double().cpu().numpy()


def features(q: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Features of F nodes for fitting: of each top [F, J, 4], of each draw [F, J + 1, M, 7].

    q: [F, V] probabilities. The features are float64 on the host.
    """
    top, largest_left, square, left = seen(outline(q))
    of_tops = np.broadcast_arrays(1.0, top, RANKS, depth)
    largest_left, square, left = (x[..., None] for x in (largest_left, square, left))
    of_draws = np.broadcast_arrays(1.0, largest_left, square, left, TURNS, square * TURNS, depth)
    return torch.from_numpy(np.stack(of_tops, -1)), torch.from_numpy(np.stack(of_draws, -1))
