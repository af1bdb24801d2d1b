"""What a verifier returns: a verdict; on an accelerator, a step that becomes one once the host has its numbers.

The sequences of a batch share the copies to the host (`HostSync`), so that the host waits once a round.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar, final

from torch import Tensor

from treespec.trees.tree import to_host

Result = TypeVar("Result")


@dataclass(frozen=True)
class Verdict:
    """The nodes and tokens that a cycle commits.

    Attributes:
        path: the accepted nodes from the root down, without the root.
        tokens: their tokens, then one more token from the target's distribution.
        drafted: number of the tree's nodes at depth 1, 2, …; [] before `verify_trees` counts them.
        forbidden_at: index in `tokens` of the first position at which the logits processors allow no token; None:
            there is none, or `verify_trees` has not looked.
    """

    path: list[int]
    tokens: list[int]
    drafted: list[int] = field(default_factory=list, compare=False)
    forbidden_at: int | None = field(default=None, compare=False)


# A verifier written as a generator function: it yields a tensor on the device, receives its copy on the host, and
# returns the verdict. `run_generator` turns it into steps.
Judging: TypeAlias = Generator[Tensor, Tensor, Verdict]


@final
@dataclass(frozen=True)
class DeviceStep:
    """The first phase of a verification is done: its numbers are on the device, and `finish` needs them on the host.

        verify_on_device(tree, p, generator)            on the device: launches, no wait
            └─ DeviceStep(numbers, finish)
        HostSync copies the numbers of all sequences    the one wait
            └─ finish(copy)                             on the host: a Verdict, or a DeviceStep for one more copy

    Attributes:
        numbers: a tensor on the device.
        finish: takes the copy of `numbers` on the host; returns the verdict or the next step.
    """

    numbers: Tensor
    finish: Callable[[Tensor], "Verdict | DeviceStep"]

    def __iter__(self) -> Judging:
        """Let a verifier that is a generator function `yield from` this step; the result is the verdict."""
        host_copy = yield self.numbers
        result = self.finish(host_copy)
        if isinstance(result, DeviceStep):
            return (yield from result)
        return result


@final
@dataclass
class HostCopy:
    """A tensor on the device and its copy on the host.

    Attributes:
        on_device: the tensor.
        on_host: its copy; `HostSync.flush` sets it.
    """

    on_device: Tensor
    on_host: Tensor = field(init=False)


@final
class HostSync:
    """Collects requests for copies to the host, and makes all of them in one copy, for which the host waits once.

    Two sequences. The verdict of the first needs one copy, that of the second two:

                    device          flush    host        device         flush    host
        sequence 0  a0 ── request ──┐     ┌─ finish: verdict
                                    ├─────┤
        sequence 1  a1 ── request ──┘     └─ finish ──── b1 ── request ────────── finish: verdict
        waits                         1                                   2

    Attributes:
        pending: the copies that the next `flush` makes.
    """

    def __init__(self) -> None:
        self.pending: list[HostCopy] = []

    def request(self, tensor: Tensor) -> HostCopy:
        """Ask for a copy of a tensor; it is there after the next `flush`."""
        copy = HostCopy(tensor)
        self.pending.append(copy)
        return copy

    def flush(self) -> None:
        """Copy all requested tensors to the host. Nothing is requested: does not wait."""
        host_tensors = to_host([copy.on_device for copy in self.pending])
        for copy, host_tensor in zip(self.pending, host_tensors, strict=True):
            copy.on_host = host_tensor
        self.pending = []


def finish_steps(
    steps: Sequence[DeviceStep | Verdict | Exception], sync: HostSync
) -> list[Verdict | Exception]:
    """Finish the steps of all sequences, with one wait a round. The first wait serves earlier requests of `sync` too.

    Args:
        steps: by sequence; a verdict or an error stays as it is.
        sync: makes the copies.

    Returns:
        By sequence its verdict, or the error of its own steps.
    """
    verdicts: dict[int, Verdict | Exception] = {}
    results = dict(enumerate(steps))
    while results:
        # 1. Steps ask for their numbers; what is no step is a sequence's verdict or error.
        open_steps: dict[int, DeviceStep] = {}
        copies: dict[int, HostCopy] = {}
        for row, result in results.items():
            if isinstance(result, DeviceStep):
                open_steps[row] = result
                copies[row] = sync.request(result.numbers)
            else:
                verdicts[row] = result

        # 2. One copy for all of them, then the host's part of each.
        sync.flush()
        results = {}
        for row, step in open_steps.items():
            results[row] = run_phase(step.finish, copies[row].on_host)
    return [verdicts[row] for row in range(len(steps))]


def finish_step(step: DeviceStep | Verdict) -> Verdict:
    """Finish the step of one sequence. Raises its error."""
    while isinstance(step, DeviceStep):
        step = step.finish(to_host([step.numbers])[0])
    return step


def run_phase(phase: Callable[..., Result], *args: Any) -> Result | Exception:
    """Run a phase of one sequence. Its error is returned as a value, so that the other sequences go on."""
    try:
        return phase(*args)
    except Exception as error:
        return error


def as_step(phase: DeviceStep | Verdict | Judging) -> DeviceStep | Verdict:
    """Return what `Verifier.verify_on_device` returned as a step: a verifier may be written as a generator function."""
    if isinstance(phase, Generator):
        return run_generator(phase)
    return phase


def run_generator(judging: Judging, host_copy: Tensor | None = None) -> DeviceStep | Verdict:
    """Run a generator up to its next `yield`, which becomes a step, or to its verdict.

    host_copy: of the tensor that it yielded last; None: it begins.
    """
    try:
        if host_copy is None:
            numbers = next(judging)
        else:
            numbers = judging.send(host_copy)
    except StopIteration as end:
        verdict: Verdict = end.value
        return verdict
    return DeviceStep(numbers, partial(run_generator, judging))
