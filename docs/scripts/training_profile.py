"""Where a training step's time goes: tokens/s, the target's share, and the share of the FLOP bound.

The bound is the time of the step's own matrix products, run again one after the other with nothing
between them. A step is one of `train`: features, loss, gradients, AdamW. Steps and products take
turns; medians are printed.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from treespec.draft.trained.kinds import KINDS
from treespec.model.target import Target
from treespec.train.config import TrainConfig
from treespec.train.kinds import TRAINING, recipe_of
from treespec.train.loss import Batch

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
}
Call = tuple[Any, tuple[Any, ...]]  # an operator, and of each argument its shape, strides and dtype


class Recorded(TorchDispatchMode):
    """Inside the block every matrix product is counted by its operator and arguments.

    `TorchDispatchMode` is torch's documented way to see operators, in a module of a private name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in PRODUCTS:
            self.calls[func, tuple(map(outline, args))] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--kinds", default="eagle,eagle3", help="of " + ", ".join(TRAINING))
    parser.add_argument("--texts", type=int, default=2, help="random texts in the batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    target = Target.load(options.target, dtype=options.dtype)
    print("| head | features | tokens/s | target's share | share of the FLOP bound |")
    print("|---|---|---|---|---|")
    for kind in options.kinds.split(","):
        config = TrainConfig(target=options.target, data="data", out="out", head=kind)
        step, features = parts_of(config, target, options.texts, options.length)
        products, forwarded = replay(recorded(step)), replay(recorded(features))
        acts = (step, features, products, forwarded)
        spent = [[seconds(act) for act in acts] for _ in range(options.rounds + 1)][1:]
        step_s, target_s, bound_s, forward_s = map(statistics.median, zip(*spent, strict=True))
        tokens = options.texts * options.length
        for name, whole, share, bound in (
            ("as training goes", step_s + target_s, target_s, bound_s + forward_s),
            ("stored", step_s, 0.0, bound_s),
        ):
            shown = f"{tokens / whole:.0f} | {share / whole:.2f} | {bound / whole:.2f}"
            print(f"| {kind} | {name} | {shown} |", flush=True)


def parts_of(
    config: TrainConfig, target: Target, texts: int, length: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step on features that are there, and the target's forward that computes them."""
    generator = torch.Generator().manual_seed(0)
    head = KINDS[config.head].new(target)
    tokens = torch.randint(target.vocab_size, (texts, length), generator=generator)

    def features() -> Tensor:
        return target.features(tokens, head.taps, last=True)

    batch = Batch(
        tokens,
        torch.ones_like(tokens, dtype=torch.bool),
        features(),
        torch.full((texts,), length),
        generator,
        recipe_of(config).unrolled_steps,
    )
    trained = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained)

    def step() -> None:
        TRAINING[config.head].objective(config, target, head, batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, features


def recorded(act: Callable[[], object]) -> Counter[Call]:
    with Recorded() as seen:
        act()
    return seen.calls


def outline(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


def replay(calls: Counter[Call]) -> Callable[[], None]:
    """All products of the calls, on random numbers."""
    made = [(func, [stand_in(one) for one in outlines], n) for (func, outlines), n in calls.items()]

    def run() -> None:
        for func, args, count in made:
            for _ in range(count):
                func(*args)

    return run


def stand_in(one: Any) -> Any:
    if not isinstance(one, tuple):
        return one
    shape, stride, dtype = one
    return torch.empty_strided(shape, stride, dtype=dtype).normal_()


def seconds(act: Callable[[], object]) -> float:
    before = time.perf_counter()
    act()
    return time.perf_counter() - before


if __name__ == "__main__":
    main()
