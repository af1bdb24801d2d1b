"""The options of `treespec calibrate`, `treespec tree` and `treespec skip`."""

from dataclasses import dataclass
from typing import ClassVar

from treespec.api.options import TREE, HeadOptions, PlacementOptions, TargetOptions, TextOptions
from treespec.errors import InputError
from treespec.options import MANY, SEEDS, TOKENS, option, shared


@dataclass(frozen=True, kw_only=True)
class FitOptions(HeadOptions, TargetOptions, PlacementOptions, TextOptions):
    """A head, and the text to measure it on."""

    head: str = shared(HeadOptions, "head", None)
    max_length: ClassVar[int] = 1024  # most tokens of a conversation or piece

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_head()


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(FitOptions):
    """Raises InputError for a number out of its range, and for --draft-vocab without --text.

    The head's directory gets calibration.json.
    """

    answers_temperature: ClassVar[float] = 1.0
    draft_vocab: int | None = option(
        "restrict drafts to the N tokens most frequent in all of --text (FR-Spec)",
        None,
        least=1,
        most=TOKENS * 10,
    )
    depth: int = option(
        "draft steps to calibrate: at least the levels of the trees you will draft",
        6,
        least=1,
        most=64,
    )
    positions: int = option(
        "positions to measure at each draft step and temperature", 1500, least=1, most=MANY
    )
    seed: int = option("seed of the answers and draws", 0, least=0, most=SEEDS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab and not self.text:
            raise InputError(
                "--draft-vocab needs --text: the target's few answers do not tell which tokens are "
                "frequent"
            )


@dataclass(frozen=True, kw_only=True)
class TreeConfig(FitOptions):
    """Raises InputError for a number out of its range, and for an unknown kind."""

    out: str = option("file for the tree, which --tree then reads; its name ends in .json")
    kind: str = option(
        "medusa: greedy, by the accuracy at each depth and rank; sequoia: optimal, by their means",
        "medusa",
        choices=("medusa", "sequoia"),
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

    @property
    def answers_temperature(self) -> float:
        return self.temperature

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes == 1 or (self.nodes == 0 and self.kind != "sequoia"):
            raise InputError(
                f"--nodes is {self.nodes}: give at least 2 (the root counts), or 0 with "
                "--kind sequoia"
            )
        if not self.out.endswith(".json"):
            raise InputError(
                f"--out {self.out} must end in .json: --tree reads a file where it does"
            )


@dataclass(frozen=True, kw_only=True)
class SkipConfig(TargetOptions, PlacementOptions):
    """Raises InputError for a number out of its range."""

    text: str = option(
        "held-out text to continue: conversations (.jsonl, .json), or plain text under any other "
        "name"
    )
    out: str = option("JSON file for the skip set, for --drafter self:FILE", "skip.json")
    trials: int = option("skip sets to try", 200, least=1, most=10**6)
    minutes: float | None = option(
        "stop trying after this number of minutes", None, least=0, most=MANY
    )
    tree: str = option(f"{TREE}; used in every trial", "confident")
    limit: int = option("number of prompts; each trial has the same", 8, least=1, most=MANY)
    max_length: int = option(
        "most tokens of a prompt; plain text is split into pieces of this length",
        256,
        least=2,
        most=TOKENS,
    )
    max_new_tokens: int = option("tokens to generate per prompt", 32, least=1, most=TOKENS)
    seed: int = option("seed of the search", 0, least=0, most=2**32 - 1)
