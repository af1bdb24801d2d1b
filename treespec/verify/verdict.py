"""What a verifier returns: a verdict; on an accelerator, a step that becomes one once the host has its numbers."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeAlias, final

from torch import Tensor


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
# returns the verdict. `treespec.verify.host_sync.run_generator` turns it into steps.
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
