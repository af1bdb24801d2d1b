"""The options of `treespec tree`."""

from dataclasses import dataclass

from treespec.api.options import HeadOptions, PlacementOptions, TargetOptions, TextOptions
from treespec.errors import InputError
from treespec.options import SEEDS, option, shared

KINDS = ("medusa", "sequoia")


@dataclass(frozen=True, kw_only=True)
class TreeConfig(HeadOptions, TargetOptions, PlacementOptions, TextOptions):
    """Raises InputError for a number out of its range, and for an unknown kind."""

    head: str = shared(HeadOptions, "head", None)
    out: str = option("file for the tree, which --tree then reads; its name ends in .json")
    kind: str = option(
        "medusa: greedy, by the accuracy at each depth and rank; sequoia: optimal, by their means",
        "medusa",
        choices=KINDS,
    )
    nodes: int = option(
        "nodes of the tree, root included; 0 (sequoia): the size and depth that decode fastest on "
        "this machine",
        64,
        least=0,
        most=4096,
    )
    depth: int = option("most levels", 6, least=1, most=64)
    ranks: int = option("most children per node", 10, least=1, most=256)
    temperature: float = option(
        "compare drafts with the target's law at this temperature", 0.0, least=0, most=100
    )
    seed: int = option("seed of the target's answers", 0, least=0, most=SEEDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_head()
        if self.nodes == 1 or (self.nodes == 0 and self.kind != "sequoia"):
            raise InputError(
                f"--nodes is {self.nodes}: give at least 2 (the root counts), or 0 with "
                "--kind sequoia"
            )
        if not self.out.endswith(".json"):
            raise InputError(
                f"--out {self.out} must end in .json: --tree reads a file where it does"
            )
