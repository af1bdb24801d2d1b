"""Times of work that a GPU does while the host goes on: wait for it before reading the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from treespec.api.spec import Spec
from treespec.decoding.decode import Decoder
from treespec.decoding.sequence import Text
from treespec.decoding.stats import Stats
from treespec.requests.request import generator_of
from treespec.shaping.law import Law
from treespec.shaping.sampling import SamplingParams
from treespec.text.ending import Ending

CPU = torch.device("cpu")


def wait(device: torch.device) -> None:
    """Wait until a GPU has done its queued work. On a CPU nothing is queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until the device has done `work`."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def stage_times(
    spec: Spec, prompt: list[int], params: SamplingParams, max_new_tokens: int, seed: int
) -> Stats:
    """Counts and stage times of one generation that waits for the device around every stage.

    spec: one that has no cached text. Waiting makes the whole generation slower than without.
    """
    device = spec.target.output_device
    decoder = Decoder(spec.target, spec.decoder.drafter, spec.verifier)
    ending = Ending(spec.target.tokenizer, spec.target.eos, (), max_new_tokens)
    generator = generator_of(seed, prompt, device)
    stats = WaitingStats(device=device)
    for _ in decoder.run([Text(prompt, ending, generator, stats, Law(params))]):
        pass
    return stats


@dataclass
class WaitingStats(Stats):
    """Stats whose clock waits for the device, so that a stage includes the work it queued."""

    device: torch.device = field(default=CPU)

    def now(self) -> float:
        wait(self.device)
        return super().now()
