"""The seam between drafting and verification: how draws are made, and the plan that answers them.

p is the target's law and q the draft's, [B, V] probabilities at B nodes.
"""

from dataclasses import Field
from typing import ClassVar, Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from treespec.trees.static import StaticTree, eagle
from treespec.trees.tree import Draws
from treespec.verify.facts import check_options

Drawing = Literal["with replacement", "without replacement", "greedy", "tops and tail"]
Chance = Literal["independent", "without replacement", "the last", "the first"]


class Scheme(Protocol):
    """A multi-draft verification scheme: pure functions over tensors.

    The rule of every lossless scheme: for all p, q and k, the sum over draws of
    Pr(draws | q) * plan(p, q, draws) is p. Rows are independent: the plan of one node may not look
    at another node's draws.

    The properties state the scheme's capabilities. Other code asks them, never for the scheme's
    class or name. A scheme is a frozen dataclass; its fields are its options. It inherits the
    defaults below. Raises InputError for an option out of its range.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __post_init__(self) -> None:
        check_options(self.name, vars(self))

    @property
    def name(self) -> str:
        """The scheme's name on the command line (`--verifier`)."""
        ...

    @property
    def lossless(self) -> bool:
        """Whether the rule holds."""
        return True

    @property
    def deterministic(self) -> bool:
        """Whether the draws are a function of q. Only then may drafted nodes be pruned."""
        return False

    @property
    def max_draws(self) -> int | None:
        """The largest number of draws at a node; None: any number."""
        return None

    @property
    def law_per_draw(self) -> bool:
        """Whether q may be [B, K, V], with a law for each draw."""
        return False

    @property
    def sure_tokens(self) -> bool:
        """Whether the scheme is a `SureScheme`."""
        return False

    @property
    def layered(self) -> bool:
        """Whether the scheme is a `treespec.verify.partial.LayerScheme`."""
        return False

    @property
    def accepted_in_turn(self) -> bool:
        """Whether a head's calibrated rates hold: distinct draws, accepted one after another."""
        return False

    @property
    def drawing(self) -> Drawing | None:
        """How the draws are made, which decides their α* (`treespec.verify.rates.OPTIMA`).

        None: α* is not known.
        """
        return None

    @property
    def chance(self) -> Chance | None:
        """Which of a node's draws chance makes, beside sure tokens, for `treespec certify`.

        "independent": all, from one law. "without replacement": all, each without the earlier ones.
        "the last": the last one, without the others. "the first": the first one. None: no draw.
        """
        return None

    @property
    def default_tree(self) -> StaticTree:
        """The tree for a draft model without measured acceptance rates."""
        return eagle()

    @property
    def draft_temperatures(self) -> tuple[float, ...]:
        """Multiples of the sampling temperature, one for each draw in order.

        The last one holds for all further draws. (): all are 1.
        """
        return ()

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        """k draws at each of B nodes. q: [B, V] or [B, K, V]. k: an int, or [B] int64."""
        ...

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        """[B, V] probabilities of the output token given the draws. q: as for `draw`."""
        ...

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """[B] the exact Pr(output is one of k draws); None where no closed form is known."""
        ...


class SureScheme(Scheme, Protocol):
    """A scheme that also answers sure tokens: the likeliest of q, taken beside the draws."""

    @property
    def sure_tokens(self) -> bool:
        return True

    @property
    def equal_draws(self) -> bool:
        """Whether all draws of a node have the same chance to be accepted."""
        return False

    def draw_with_sure(
        self, q: Tensor, drawn: Tensor, sure: Tensor, generator: torch.Generator
    ) -> Draws:
        """The `sure` likeliest tokens of each node, and `drawn` draws from q without them.

        q: [B, V] probabilities. drawn, sure: [B] int64, on the host.
        """
        ...


def takes_sure_tokens(scheme: Scheme) -> TypeGuard[SureScheme]:
    """Whether the scheme is a `SureScheme`, in the type checker's terms."""
    return scheme.sure_tokens
