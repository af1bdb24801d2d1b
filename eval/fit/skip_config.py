"""The options of `treespec skip`."""

from dataclasses import dataclass

from treespec.api.options import TREE, PlacementOptions, TargetOptions
from treespec.options import MANY, TOKENS, option


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
