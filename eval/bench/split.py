"""Times of work that a device does while the host goes on: wait for it at both ends of every stage."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from treespec.decode import Decoder, Text
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


def split(
    spec: Spec, prompt: list[int], params: SamplingParams, max_new_tokens: int, seed: int
) -> Stats:
    """The stages of a generation by a fresh `spec`, which is slower for the waiting."""
    device = spec.target.output_device
    decoder = Decoder(spec.target, spec.decoder.drafter, spec.verifier)
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

    def now(self) -> float:
        wait(self.device)
        return super().now()
