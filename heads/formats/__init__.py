"""Checkpoint formats of other projects: `READERS` turn what a directory holds into treespec's config and tensors.

A reader is a function (config.json, tensors by name) -> (config, tensors) that raises ValueError for what it cannot
turn. What is treespec's own already comes out as it went in.
"""

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor

from treespec.heads.formats import eagle, eagle3, hydra, medusa, speculators

Config = dict[str, Any]
Tensors = dict[str, Tensor]

READERS: dict[str, Callable[[Config, Tensors], tuple[Config, Tensors]]] = {
    "speculators": speculators.read,
    "medusa": medusa.read,
    "hydra": hydra.read,
    "eagle3": eagle3.read,
    "eagle": eagle.read,
}


def read(config: Config, tensors: Tensors) -> tuple[str, Config, Tensors]:
    """The kind of head that a directory holds, and its config and tensors as that head takes them.

    Raises ValueError for what is not understood.
    """
    name = format_of(config, tensors)
    return "eagle3" if name == "speculators" else name, *READERS[name](config, tensors)


def levels_of(config: Config, names: Collection[str]) -> int | None:
    """How many levels a head drafts, by its config and its tensors' names; None: any number, or they do not tell."""
    several = {"medusa": medusa.levels, "hydra": hydra.levels}
    name = format_of(config, names)
    return several[name](config, names) if name in several else None


def format_of(config: Config, tensors: Collection[str]) -> str:
    """The name of the reader. Configs of several heads leave out what has their library's default: see the tensors."""
    if "speculators_model_type" in config:
        return "speculators"
    for name, mark in (("medusa", medusa.MARK), ("hydra", hydra.MARK)):
        if f"{name}_num_heads" in config or config.get("model_type") == name or any(map(mark.match, tensors)):
            return name
    three = "draft_vocab_size" in config or "eagle3" in str(config.get("architectures")).lower()
    return "eagle3" if three else "eagle"
