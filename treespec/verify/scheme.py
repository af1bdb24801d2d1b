"""The seam between drafting and verification: how draws are made, and the plan that answers them.

p is the target's distribution and q the draft's, [B, V] probabilities at B nodes.
"""

from dataclasses import Field
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from treespec.errors import InputError
from treespec.trees.static import StaticTree, build_eagle_tree
from treespec.trees.tree import Draws, to_device
from treespec.verify.facts import check_scheme_options

RandomDraws = Literal["independent", "without replacement", "the last", "the first"]


class Scheme(Protocol):
    """A multi-draft verification scheme: pure functions over tensors.

    The rule of every lossless scheme: for all p, q and k, the sum over draws of
    Pr(draws | q) * plan(p, q, draws) is p. Rows are independent: the plan of one node may not look
    at another node's draws.

    The properties state the scheme's capabilities; callers test them, not its class or name. A scheme
    is a frozen dataclass; its fields are its options. It inherits the defaults below. Raises InputError
    for an option out of its range.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __post_init__(self) -> None:
        check_scheme_options(self.name, vars(self))

    name: ClassVar[str]
    """The scheme's name on the command line (`--verifier`)."""

    lossless: ClassVar[bool] = True
    """Whether the rule holds."""

    deterministic: ClassVar[bool] = False
    """Whether the draws are a function of q. Only then may drafted nodes be pruned."""

    max_draws: ClassVar[int | None] = None
    """The largest number of draws at a node; None: any number."""

    @property
    def drawing(self) -> str | None:
        """How the draws are made, which decides their α* (`treespec.verify.rates.find_optimum`).

        A kind, such as "with replacement", and its options behind a comma. None: α* is not known.
        """
        return None

    random_draws: ClassVar[RandomDraws | None] = None
    """Which of a node's draws are random, next to tokens that are certain, for `treespec certify`.

    "independent": all, from one distribution. "without replacement": all, each without the earlier ones.
    "the last": the last one, without the others. "the first": the first one. None: no draw.
    """

    default_tree: ClassVar[StaticTree] = build_eagle_tree()
    """The tree for a draft model without measured acceptance rates."""

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        """k draws at each of B nodes. q: [B, V]. k: an int, or [B] int64.

        Where k lies on the host, the device does not wait. Raises InputError as `check_width`.
        """
        if isinstance(k, int):
            width = k
            number = torch.full((len(q), 1), k, device=q.device)
        else:
            width = int(k.max())
            number = to_device(k, q.device)[:, None]
        check_width(self, width)
        return self.make(q, width, number, generator)

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        """`draw` for `number` [B, 1] draws at each node, at most `width`."""
        ...

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        """[B, V] probabilities of the output token given the draws."""
        ...

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """[B] the exact Pr(output is one of k draws); None where no closed form is known."""
        ...


def check_width(scheme: Scheme, width: int) -> None:
    """Raises InputError for more than `max_draws` draws a node. width: draws at the widest node."""
    if scheme.max_draws and width > scheme.max_draws:
        raise InputError(
            f"verifier {scheme.name} answers at most {scheme.max_draws} draws a node, not {width}; "
            "take a narrower tree, or a verifier for any number of draws, such as rrs"
        )
