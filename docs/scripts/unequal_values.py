"""What draws of unequal value bring under each scheme, and the bound for independent draws.

The laws are those that `treespec acceptance --out FOLDER` keeps in FOLDER/logits.safetensors.
"""

import argparse

import torch
from safetensors.torch import load_file
from torch import Tensor

from treespec.eval.acceptance.run import average
from treespec.sampling import SamplingParams, probs
from treespec.verify import valued
from treespec.verify.registry import scheme_by_name
from treespec.verify.scheme import Scheme

VALUES = ((2.0, 1.5, 1.0, 1.0), (3.0, 1.0, 1.0, 1.0))  # of the draws, in draw order
BOUND = "no plan for independent draws brings more"
SCHEMES = (
    "valued:values={}",
    "optimal:threshold=1,extra=0,first=1",
    "rrs",
    "optimal:threshold=1,extra=0",
    "valued:values={},extra=1",
    "rrs-wo",
    "optimal:first=1",
    "optimal",
)
ROWS = 400  # at a time


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "logits", help="FOLDER/logits.safetensors of treespec acceptance --out FOLDER"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.6, 1.0])
    parser.add_argument("--samples", type=int, default=64, help="draws at a position")
    options = parser.parse_args()
    kept = load_file(options.logits)
    columns = [(temperature, values) for temperature in options.temperatures for values in VALUES]
    rows: dict[str, list[str]] = {}
    for temperature, values in columns:
        p, q = (probs(kept[name], SamplingParams(temperature)) for name in "pq")
        laws = zip(p.split(50), q.split(50), strict=True)
        best = torch.cat([bound(*pair, values) for pair in laws])
        found = {BOUND: best}
        for name in SCHEMES:
            scheme = scheme_by_name(name.format("/".join(f"{value:g}" for value in values)))
            found[name.replace("values={},", "").replace(":values={}", "")] = brought(
                scheme, p, q, values, options.samples
            )
        for name, value in found.items():
            mean, gap = average(value, kept["group"]), average(best - value, kept["group"])
            rows.setdefault(name, []).append(
                f"{mean['value']:.3f} ({gap['value']:.3f}, {gap['error']:.3f})"
            )
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


def bound(p: Tensor, q: Tensor, values: tuple[float, ...]) -> Tensor:
    """[B] the dual at the best prices found: an upper bound.

    Values that are multiples of a half have best prices that are multiples of a half.
    """
    # 1. Prices by `valued` itself, on a finer grid than it decodes with.
    usual = valued.CELLS, valued.STEPS
    valued.CELLS, valued.STEPS = 512, 640
    p, q = p.double(), q.double() / q.sum(-1, keepdim=True, dtype=torch.float64)
    levels = (torch.tensor(values) * valued.LEVELS / values[0]).round().long().expand(len(p), -1)
    cell, price, _ = valued.select(p, q, levels, torch.ones_like(levels, dtype=torch.bool))
    valued.CELLS, valued.STEPS = usual
    # 2. The dual holds at any prices: take the better of these and of these in halves.
    prices = price.gather(1, cell).clamp(max=valued.LEVELS) * values[0] / valued.LEVELS
    return torch.minimum(dual(p, q, prices, values), dual(p, q, (2 * prices).round() / 2, values))


def dual(p: Tensor, q: Tensor, prices: Tensor, values: tuple[float, ...]) -> Tensor:
    """[B] the dual's value, exactly. p, q, prices: [B, V]."""
    # 1. The gains at which Pr(no draw gains more) changes, in ascending order.
    gains = torch.stack([value - prices for value in values])
    steps = torch.cat([torch.zeros_like(p[:, :1]), *gains.clamp(min=0)], dim=1).sort(-1).values
    # 2. Draws are independent, so that chance is a product over the draws.
    below = torch.ones_like(steps[:, 1:])
    for gain in gains:
        ascending, order = gain.sort(-1)
        mass = torch.nn.functional.pad(q.gather(1, order).cumsum(-1), (1, 0))
        below *= mass.gather(
            1, torch.searchsorted(ascending, steps[:, :-1].contiguous(), right=True)
        )
    # 3. What the prices cost, and the expected largest gain.
    return (p * prices).sum(-1) + ((1 - below) * steps.diff(dim=-1)).sum(-1)


def brought(
    scheme: Scheme, p: Tensor, q: Tensor, values: tuple[float, ...], samples: int
) -> Tensor:
    """[B] the expected value of the accepted draw.

    A repeated token counts as the first draw that carries it.
    """
    generator = torch.Generator().manual_seed(0)
    means = []
    many_p, many_q = (law.repeat_interleave(samples, 0) for law in (p, q))
    for some_p, some_q in zip(many_p.split(ROWS), many_q.split(ROWS), strict=True):
        draws = scheme.draw(some_q, len(values), generator)
        tokens = draws.tokens
        repeats = (tokens[:, :, None] == tokens[:, None]).tril(-1).any(-1)
        mass = scheme.plan(some_p, some_q, draws).gather(1, tokens.clamp(min=0))
        mass = mass * ((tokens >= 0) & ~repeats)
        means.append(mass[:, : len(values)] @ torch.tensor(values))
    return torch.cat(means).view(-1, samples).mean(1)


if __name__ == "__main__":
    main()
