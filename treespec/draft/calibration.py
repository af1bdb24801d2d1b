"""What a head's laws promise: the chance of each top token and of each draw, from q alone.

Two logistic models, fitted once on held-out text: Pr(the r-th likeliest token is output) from its q, its rank and the
depth; and Pr(the i-th draw is accepted | those before it were not) from the shape of what the tops leave of q.
"""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from treespec.errors import InputError
from treespec.sampling import largest

FILE = "calibration.json"
TOPS, DRAWS = 5, 6  # at most, at one node
TOP_FEATURES, DRAW_FEATURES = 4, 7


@dataclass(frozen=True)
class Calibration:
    """tops, draws: weights of the two models. sizes: by temperature, pairs (price of a node, mean nodes of a tree).

    greedy: weights of the first model where the target takes its likeliest token; none in a file of an older version.
    Saved as calibration.json beside the head.
    """

    tops: tuple[float, ...]
    draws: tuple[float, ...]
    sizes: dict[str, list[tuple[float, float]]]
    greedy: tuple[float, ...] = ()

    def price(self, nodes: int, temperature: float) -> float:
        """The price of a node at which trees have so many nodes on average."""
        return float(self.prices(nodes, temperature)[-1])

    def prices(self, most: int, temperature: float) -> Tensor:
        """[most - 1] the prices at which trees have 2, 3, … nodes on average; log-log interpolation.

        Of prices that give equally many the lowest counts.
        """
        nearest = min(self.sizes, key=lambda t: abs(math.log(float(t) / temperature)))
        cheapest = {size: price for price, size in sorted(self.sizes[nearest], reverse=True)}
        size, price = torch.tensor(sorted(cheapest.items()), dtype=torch.float64).log().T.contiguous()
        wanted = torch.arange(2, most + 1, dtype=torch.float64).log()
        if len(size) == 1:
            return price.expand_as(wanted).exp()
        right = torch.searchsorted(size, wanted).clamp_(1, len(size) - 1)
        slope = price.diff() / size.diff().clamp_(min=1e-9)
        return (price[right - 1] + slope[right - 1] * (wanted - size[right - 1])).exp()

    def sure(self, law: Tensor, depth: int) -> Tensor:
        """[F, K] Pr(the r-th likeliest token is the target's choice at temperature 0), of nodes at a depth.

        law: [F, K] of the likeliest tokens at temperature 1, descending; it is the answer where nothing was fitted.
        """
        if not self.greedy:
            return law
        one, odds, rank, deep = self.greedy
        place = torch.arange(1, law.shape[1] + 1, device=law.device, dtype=law.dtype).log_()
        chance = torch.sigmoid(law.logit(1e-6) * odds + place.mul_(rank).add_(one + deep * depth))
        return chance / chance.sum(-1, keepdim=True).clamp_(min=1)

    def chances(self, q: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Of F nodes at a depth: [F, J] Pr(the r-th likeliest is output), [F, J + 1, M] Pr(the i-th draw is accepted).

        q: [F, V] probabilities. The second is for 0 to J tokens taken for sure.
        """
        top, largest_left, square, left = seen(q)
        one, odds, rank, deep = self.tops
        place = torch.arange(1, TOPS + 1, device=q.device, dtype=q.dtype).log_()
        tops = torch.sigmoid(top * odds + place.mul_(rank).add_(one + deep * depth))
        tops = tops / tops.sum(-1, keepdim=True).clamp_(min=1)
        one, odds, even, room, turn, turn_even, deep = self.draws
        place = torch.arange(1, DRAWS + 1, device=q.device, dtype=q.dtype).log_()
        first = (largest_left * odds).add_(square, alpha=even).add_(left, alpha=room).add_(one + deep * depth)
        score = torch.addcmul(first[..., None], (square * turn_even).add_(turn)[..., None], place)
        refused = torch.sigmoid(-score).cumprod(-1)  # [F, J + 1, M]
        untaken = (1 - pad(tops.cumsum(-1), (1, 0))).clamp_(min=0)
        return tops, untaken[..., None] * -pad(refused, (1, 0), value=1).diff(dim=-1)


def seen(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of F nodes: [F, J] log-odds of the tops, and, [F, J + 1] where 0 to J tops are taken, of what is left of q the

    log-odds of the largest, the log of the sum of squares, and the log of its mass. q: [F, V] probabilities.
    """
    count = min(TOPS + 1, q.shape[-1])
    top = pad(largest(q, count)[0], (0, TOPS + 1 - count)).clamp(1e-9, 1 - 1e-6)  # [F, J + 1]
    taken = pad(top[:, :-1], (1, 0))
    left = (1 - taken.cumsum(-1)).clamp_(min=1e-6)
    square = (q.square().sum(-1, keepdim=True) - taken.square().cumsum(-1)) / left.square()
    return top[:, :-1].logit(), (top / left).logit(1e-6), square.clamp_(1e-6, 1).log_(), left.log()


def features(q: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """What the models see of F nodes: [F, J, 4] of each top, [F, J + 1, M, 7] of each draw. q: [F, V]."""
    top, largest_left, square, left = seen(q)
    rank = torch.arange(1, TOPS + 1, device=q.device, dtype=q.dtype).log().expand(len(q), -1)
    of_tops = [torch.ones_like(rank), top, rank, torch.full_like(rank, depth)]
    turn = torch.arange(1, DRAWS + 1, device=q.device, dtype=q.dtype).log().expand(len(q), TOPS + 1, -1)
    one = torch.ones_like(turn)
    largest_left, square, left = (x[..., None] * one for x in (largest_left, square, left))
    of_draws = [one, largest_left, square, left, turn, square * turn, depth * one]
    return torch.stack(of_tops, dim=-1), torch.stack(of_draws, dim=-1)


def save_calibration(calibration: Calibration, folder: str | Path) -> None:
    """Under a temporary name first, so that a kill leaves the old file or the new one."""
    temporary = Path(folder) / f".{FILE}-{os.getpid()}"
    temporary.write_text(json.dumps(asdict(calibration), indent=2) + "\n")
    os.replace(temporary, Path(folder) / FILE)


def load_calibration(folder: str | Path) -> Calibration | None:
    """None where there is none. Raises InputError for a file that is not understood."""
    file = Path(folder) / FILE
    if not file.exists():
        return None
    try:
        given = json.loads(file.read_text())
        sizes = {t: [(float(a), float(b)) for a, b in pairs] for t, pairs in given["sizes"].items()}
        tops, draws = (tuple(map(float, given[name])) for name in ("tops", "draws"))
        greedy = tuple(map(float, given.get("greedy", ())))
        lengths = len(tops), len(draws), len(greedy) or TOP_FEATURES
        if lengths != (TOP_FEATURES, DRAW_FEATURES, TOP_FEATURES) or not sizes or not all(sizes.values()):
            raise ValueError("weights or sizes are missing")
        return Calibration(tops, draws, sizes, greedy)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file} is not understood: make it again with treespec calibrate") from error
