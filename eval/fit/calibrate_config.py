"""The options of `treespec calibrate`."""

from dataclasses import dataclass

from treespec.api.options import HeadOptions, PlacementOptions, TargetOptions, TextOptions
from treespec.errors import InputError
from treespec.options import MANY, SEEDS, TOKENS, option, shared


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(HeadOptions, TargetOptions, PlacementOptions, TextOptions):
    """Raises InputError for a number out of its range, and for --draft-vocab without --text."""

    head: str = shared(HeadOptions, "head", None)  # its directory gets calibration.json
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
        self.check_head()
        if self.draft_vocab and not self.text:
            raise InputError(
                "--draft-vocab needs --text: the target's few answers do not tell which tokens are "
                "frequent"
            )
