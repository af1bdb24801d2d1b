"""Short names of the parts of a `Spec`."""

from pathlib import Path

from treespec.draft.source import Source
from treespec.model.target import Target
from treespec.trees.shape import Policy
from treespec.verify.walk import Verifier


def target_name(target: Target) -> str:
    """The name of its directory, or its hub id, or its architecture."""
    known = str(getattr(target.model, "name_or_path", "") or "")
    return (Path(known).name if Path(known).is_dir() else known) or type(target.model).__name__


def drafting_names(source: Source | None, tree: Policy | None, verifier: Verifier) -> list[str]:
    """The names of drafter, tree and verifier, or `no drafter`."""
    if source is None:
        return ["no drafter"]
    return [source.name, *([tree_name(tree)] if tree else []), f"verifier {verifier.name}"]


def tree_name(tree: Policy) -> str:
    """The kind of tree and its numbers. A static tree has its drafted nodes and levels."""
    return str(tree)
