"""Parses the tree policies that `--tree` names. This module loads neither torch nor numpy."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points

from treespec.trees.confident import ConfidentChain
from treespec.trees.dynamic import AutoTree, DDTree, DynamicTree
from treespec.trees.shape import Policy, TreeError
from treespec.trees.static import (
    build_balanced_tree,
    build_chain,
    build_eagle_tree,
    build_level_tree,
    build_medusa_tree,
    read_tree_file,
)


@dataclass(frozen=True)
class TreeSyntax:
    """One form of a `--tree` value.

    Attributes:
        example: a value of this form, for the help.
        read: turns the text after "name:" into a policy; it returns None if that text is malformed.
    """

    example: str
    read: Callable[[str], Policy | None]


def build_options_form(kind: type[Policy], example_option: str = "") -> TreeSyntax:
    """Returns the form of a policy with named options: `dynamic`, or `dynamic:depth=6,topk=10`.

    example_option: the option that the example sets; "" for none.
    """
    example = kind.name
    if example_option:
        example = f"{kind.name}:{example_option}={getattr(kind, example_option)}"

    def read(text: str) -> Policy:
        return kind(**parse_tree_options(kind, text))

    return TreeSyntax(example, read)


def build_sized_form(example: str, form: str, tree: Callable[..., Policy]) -> TreeSyntax:
    """Returns the form of a tree given by its sizes.

    form: a pattern with one group for each size; "" for a tree without sizes.
    """

    def read(text: str) -> Policy | None:
        sizes = re.fullmatch(form, text)
        if sizes is None:
            return None
        return tree(*map(int, sizes.groups()))

    return TreeSyntax(example, read)


def read_levels(text: str) -> Policy | None:
    """Reads `3x2x1`, the number of children at each level; returns None for another form."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        return None
    return build_level_tree(*map(int, text.split("x")))


TREE_FORMS_TABLE: dict[str, TreeSyntax] = {
    "auto": build_options_form(AutoTree),
    "eagle": build_sized_form("eagle", "", build_eagle_tree),
    "medusa": build_sized_form("medusa", "", build_medusa_tree),
    "chain": build_sized_form("chain:5", r"(\d+)", build_chain),
    "balanced": build_sized_form("2x4", r"(\d+)x(\d+)", build_balanced_tree),
    "levels": TreeSyntax("levels:3x2x1", read_levels),
    "dynamic": build_options_form(DynamicTree, "nodes"),
    "ddtree": build_options_form(DDTree, "nodes"),
    "confident": build_options_form(ConfidentChain),
}
TREE_EXAMPLES = {name: form.example for name, form in TREE_FORMS_TABLE.items()}
TREE_SYNTAX = f"{', '.join(TREE_EXAMPLES.values())}, or a JSON file of paths"


@cache
def list_forms() -> dict[str, TreeSyntax]:
    """Returns all forms by name, including those of installed packages."""
    installed = entry_points(group="treespec.trees")
    return TREE_FORMS_TABLE | {point.name: point.load() for point in installed}


def parse_policy(spec: str) -> Policy:
    """Returns the policy that a `--tree` value names; `TREE_SYNTAX` lists the forms.

    2x4 is short for balanced:2x4. Raises TreeError for an unknown name, a malformed value or a bad tree file.
    """
    name, _, text = spec.partition(":")
    form = list_forms().get(name)
    if form:
        tree = form.read(text)
    else:
        tree = TREE_FORMS_TABLE["balanced"].read(spec)
    if tree:
        return tree
    if spec.endswith(".json"):
        return read_tree_file(spec)
    hint = ""
    for close in difflib.get_close_matches(name, list_forms(), n=1):
        hint = f" (did you mean {close}?)"
    raise TreeError(f"unknown tree {spec!r}{hint}: choose {TREE_SYNTAX}")


def parse_tree_options(kind: type[Policy], text: str) -> dict[str, float]:
    """Parses `depth=6,topk=10` into keyword arguments of the policy.

    Raises TreeError for an unknown option and for a value that is not a number.
    """
    options = {option.name: option for option in fields(kind)}
    values: dict[str, float] = {}
    parts = []
    if text:
        parts = text.split(",")
    for part in parts:
        name, _, number = part.partition("=")
        try:
            if options[name].type is int:
                values[name] = int(number)
            else:
                values[name] = float(number)
        except (KeyError, ValueError):
            choice = ", ".join(f"{option.name}={option.default}" for option in options.values())
            raise TreeError(
                f"tree '{kind.name}:{text}': {part!r} is not understood; its options are {choice}"
            ) from None
    return values


Form = TreeSyntax  # its name in earlier pages, which rows of other packages import
