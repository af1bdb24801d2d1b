"""Times of work that a device does while the host goes on: wait for it at both ends of every stage."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from treespec.cache import TreeCache
from treespec.decode import Decoder, Text
from treespec.draft.proposer import Frontier, Proposer
from treespec.draft.tree_drafter import TreeDrafter
from treespec.sampling import SamplingParams
from treespec.spec import Spec
from treespec.stats import Stats
from treespec.text.ending import Ending

CPU = torch.device("cpu")


def wait(device: torch.device) -> None:
    """Until a GPU has done what it was given; a CPU works while one waits."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """What `work` takes until the device has done it."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def split(spec: Spec, prompt: list[int], params: SamplingParams, max_new_tokens: int, seed: int) -> Stats:
    """The stages of a generation by a fresh `spec`, which is slower for the waiting."""
    device, drafter = spec.target.output_device, spec.decoder.drafter
    if isinstance(drafter, TreeDrafter):
        proposer: Any = Waiting(drafter.proposer, device)
        drafter = TreeDrafter(proposer, drafter.policy, drafter.scheme, drafter.calibration, drafter.times)
    decoder = Decoder(spec.target, drafter, spec.verifier)
    ending = Ending(spec.target.tokenizer, spec.target.eos, (), max_new_tokens)
    generator = torch.Generator(device=device).manual_seed(seed)
    stats = WaitingStats(device=device)
    for _ in decoder.run([Text(prompt, ending, generator, stats)], params):
        pass
    return stats


@dataclass
class WaitingStats(Stats):
    """Stats whose stages end when the device has done them."""

    device: torch.device = field(default=CPU)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        wait(self.device)
        with super().timed(stage):
            yield
            wait(self.device)


@final
class Waiting:
    """A proposer whose forwards end when the device has done them; all else is the proposer's own."""

    def __init__(self, proposer: Proposer, device: torch.device) -> None:
        self.proposer, self.device, self.forward_seconds = proposer, device, 0.0

    def new(self) -> "Waiting":
        return Waiting(self.proposer.new(), self.device)

    def begin(self, roots: Tensor, cache: TreeCache) -> list[Tensor | None]:
        return self._timed(lambda: self.proposer.begin(roots, cache))

    def extend(self, frontiers: Sequence[Frontier | None]) -> list[Tensor]:
        return self._timed(lambda: self.proposer.extend(frontiers))

    def _timed(self, forward: Callable[[], Any]) -> Any:
        found: list[Any] = []
        self.forward_seconds += seconds(lambda: found.append(forward()), self.device)
        return found[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.proposer, name)
