"""The interface between drafting and verification: how draws are made, and the plan of the output token.

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
DRAWING_BY_RANDOM_DRAWS: dict[str | None, str] = {
    "independent": "with replacement",
    "without replacement": "without replacement",
    "the last": "greedy",
}


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

    takes_most_likely: ClassVar[bool] = False
    """Whether the draws are the most likely tokens of q, as `topk` takes them; then a CPU may rank them itself."""

    max_draws: ClassVar[int | None] = None
    """The largest number of draws at a node; None: any number."""

    takes_several_models: ClassVar[bool] = False
    """Whether a node's draws may come from M draft models: q is then [B, M, V], and draw k comes from model k mod M."""

    @property
    def drawing(self) -> str | None:
        """How the draws are made, which decides their α* (`treespec.verify.rates.find_optimum`).

        A kind, such as "with replacement", then a comma and its options. None: α* is not known. By default it follows
        from `random_draws` and `takes_most_likely`.
        """
        if self.takes_most_likely:
            return "most likely"
        return DRAWING_BY_RANDOM_DRAWS.get(self.random_draws)

    random_draws: ClassVar[RandomDraws | None] = None
    """Which of a node's draws are random, for `treespec certify`; the other draws are certain.

    "independent": all, from one distribution. "without replacement": all, each without the earlier draws.
    "the last": the last draw, without the others. "the first": the first draw. None: no draw.
    """

    default_tree: ClassVar[StaticTree] = build_eagle_tree()
    """The tree for a draft model without measured acceptance rates."""

    def draw(self, q: Tensor, k: int | Tensor, generator: torch.Generator) -> Draws:
        """Make k draws at each of B nodes.

        Args:
            q: [B, V] the draft's distribution.
            k: an int, or [B] int64. A k on the host costs no sync.
            generator: on the device of q.

        Raises:
            InputError: as `check_width`.
        """
        if isinstance(k, int):
            width = k
            number = torch.full((len(q), 1), k, dtype=torch.int64, device=q.device)
        else:
            width = int(k.max())
            number = to_device(k, q.device)[:, None]
        check_width(self, width)
        return self.make(q, width, number, generator)

    def make(self, q: Tensor, width: int, number: Tensor, generator: torch.Generator) -> Draws:
        """Make `number` [B, 1] draws at each node, at most `width`; `draw` calls it.

        Args:
            q: [B, V] the draft's distribution.
            width: columns of the draws.
            number: [B, 1] draws at each node; further columns are -1.
            generator: on the device of q.
        """
        ...

    def plan(self, p: Tensor, q: Tensor, draws: Draws) -> Tensor:
        """Return [B, V] probabilities of the output token given the draws. p, q: [B, V]."""
        ...

    def acceptance_rate(self, p: Tensor, q: Tensor, k: int) -> Tensor | None:
        """Return [B] the exact Pr(output is one of k draws); None if no closed form is known. p, q: [B, V]."""
        ...


def check_width(scheme: Scheme, width: int) -> None:
    """Raise InputError for more than `max_draws` draws a node. width: draws at the widest node."""
    if scheme.max_draws and width > scheme.max_draws:
        raise InputError(
            f"verifier {scheme.name} answers at most {scheme.max_draws} draws a node, not {width}; "
            "take a narrower tree, or a verifier for any number of draws, such as rrs"
        )
