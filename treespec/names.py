"""Short names of the parts of a `Spec`."""

from pathlib import Path

from treespec.draft.source import Source
from treespec.target import Target
from treespec.trees.policy import Policy
from treespec.trees.static import StaticTree
from treespec.verify.walk import Verifier


def target_name(target: Target) -> str:
    """The name of its directory or its hub id; without either its architecture."""
    known = str(getattr(target.model, "name_or_path", "") or "")
    return (Path(known).name if Path(known).is_dir() else known) or type(target.model).__name__


def drafting_names(source: Source | None, tree: Policy | None, verifier: Verifier) -> list[str]:
    """The names of drafter, tree and verifier, or `no drafter`."""
    if source is None:
        return ["no drafter"]
    return [source.name, *([tree_name(tree)] if tree else []), f"verifier {verifier.name}"]


def tree_name(tree: Policy) -> str:
    """The kind of tree and its numbers. A static tree has its drafted nodes and levels."""
    if isinstance(tree, StaticTree):
        return f"static tree of {tree.size - 1} nodes, {tree.max_depth} deep"
    numbers = ", ".join(f"{name}={value}" for name, value in vars(tree).items() if value is not None)
    kind = type(tree).__name__.removesuffix("Tree").removesuffix("Chain").lower()
    return f"{kind} tree ({numbers})"
