"""Looks up the rotary embedding's angles instead of computing them in every forward.

torch computes cosines by a library with threads of its own: for a few numbers it wakes a thread, which then spins for
ten milliseconds. Beside a busy process that thread takes the processor of the one that decodes.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

MOST_POSITIONS = 1 << 16  # of a table; 16 MB for a head's width of 64 in bfloat16
FIRST_POSITIONS = 1 << 11
# Kinds of rotary embeddings whose frequencies follow the length of the text.
MOVING_KINDS = ("dynamic", "longrope")


@final
class TabulatedAngles:
    """The forward of a rotary embedding of fixed frequencies: it looks up what the module computes.

    Attributes:
        module: the rotary embedding.
        plain_forward: its own forward.
        known: cos and sin of the first positions.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.plain_forward = module.forward
        self.known: AngleTable | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the module has its own forward."""
        module = memo[id(self.module)]
        forward: Callable[..., Any] = type(module).forward.__get__(module)
        return forward

    def __call__(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, [B, N, R] each, in the dtype of x. position_ids: [B, N]."""
        if not x.is_cpu or position_ids.dim() != 2 or not position_ids.numel():
            return self.plain_forward(x, position_ids)
        end = int(position_ids.max()) + 1
        if end > MOST_POSITIONS or int(position_ids.min()) < 0:
            return self.plain_forward(x, position_ids)
        table = self.known
        if table is None or end > table.angles.shape[1] or not table.is_of(self.module, x.dtype):
            table = self.compute_table(x, end)
            self.known = table
        angles = table.angles.index_select(1, position_ids.flatten())
        cos, sin = angles.unflatten(1, position_ids.shape)
        return cos, sin

    def compute_table(self, x: Tensor, end: int) -> "AngleTable":
        """Computes the angles of positions below `end` and some more. x: of their dtype and device."""
        size = FIRST_POSITIONS
        while size < end:
            size *= 2
        frequencies = self.module.inv_freq
        version = frequencies._version
        positions = torch.arange(size, dtype=torch.int64, device=x.device)[None]
        angles = torch.cat(self.plain_forward(x, positions))
        return AngleTable(angles, frequencies, version, self.module.attention_scaling)


class AngleTable(NamedTuple):
    """Angles, and what they were computed from.

    Attributes:
        angles: [2, P, R] cos and sin of P positions.
        frequencies: the module's.
        version: of the frequencies, which a change in place counts up.
        scaling: factor of the angles.
    """

    angles: Tensor
    frequencies: Tensor
    version: int
    scaling: float

    def is_of(self, module: Any, dtype: torch.dtype) -> bool:
        """Whether the module would compute these angles."""
        frequencies = module.inv_freq
        if frequencies is not self.frequencies or frequencies._version != self.version:
            return False
        return bool(self.scaling == module.attention_scaling and self.angles.dtype == dtype)


def tabulate_angles(model: nn.Module) -> None:
    """Gives the rotary embeddings of a model on a CPU tables of their angles, where their frequencies are fixed."""
    for module in model.modules():
        if has_fixed_frequencies(module):
            module.forward = TabulatedAngles(module)


def has_fixed_frequencies(module: Any) -> bool:
    """Whether a module is a rotary embedding of transformers that computes cos and sin from positions alone."""
    if not hasattr(module, "inv_freq") or not hasattr(module, "attention_scaling"):
        return False
    if "forward" in vars(module) or getattr(module, "rope_type", None) in (None, *MOVING_KINDS):
        return False
    if list(inspect.signature(module.forward).parameters) != ["x", "position_ids"]:
        return False
    x = torch.zeros(1, dtype=torch.float32, device="cpu")
    positions = torch.arange(3, dtype=torch.int64, device="cpu")[None]
    angles = module.forward(x, positions)
    if not isinstance(angles, tuple) or len(angles) != 2:  # Llama 4 gives complex numbers
        return False
    return all(part.shape[:2] == positions.shape and part.dim() == 3 for part in angles)
