"""Parses the tree policies that `--tree` names. This module loads neither torch nor numpy."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from treespec.errors import InputError, find_similar_name
from treespec.trees.confident import ConfidentChain
from treespec.trees.dynamic import AutoTree, DDTree, DynamicTree
from treespec.trees.extensions import (
    describe_object,
    describe_own,
    find_path,
    load_installed_rows,
    load_row,
)
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
        needs: what must stand after "name:", for an error; "" for a form that may go without.
    """

    example: str
    read: Callable[[str], Policy | None]
    needs: str = ""


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


def build_sized_form(
    example: str, form: str, tree: Callable[..., Policy], needs: str = ""
) -> TreeSyntax:
    """Returns the form of a tree given by its sizes.

    form: a pattern with one group for each size; "" for a tree without sizes. needs: as for `TreeSyntax`.
    """

    def read(text: str) -> Policy | None:
        sizes = re.fullmatch(form, text)
        if sizes is None:
            return None
        return tree(*map(int, sizes.groups()))

    return TreeSyntax(example, read, needs)


def read_levels(text: str) -> Policy | None:
    """Reads `3x2x1`, the number of children at each level; returns None for another form."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        return None
    return build_level_tree(*map(int, text.split("x")))


TREE_FORMS_TABLE: dict[str, TreeSyntax] = {
    "auto": build_options_form(AutoTree),
    "eagle": build_sized_form("eagle", "", build_eagle_tree),
    "medusa": build_sized_form("medusa", "", build_medusa_tree),
    "chain": build_sized_form("chain:5", r"(\d+)", build_chain, "a length"),
    "balanced": build_sized_form("2x4", r"(\d+)x(\d+)", build_balanced_tree, "children and depth"),
    "levels": TreeSyntax("levels:3x2x1", read_levels, "the children of each level"),
    "dynamic": build_options_form(DynamicTree, "nodes"),
    "ddtree": build_options_form(DDTree, "nodes"),
    "confident": build_options_form(ConfidentChain),
}
TREE_EXAMPLES = {name: form.example for name, form in TREE_FORMS_TABLE.items()}
TREE_SYNTAX = f"{', '.join(TREE_EXAMPLES.values())}, or a JSON file of paths"


@cache
def list_forms() -> dict[str, TreeSyntax]:
    """Returns all forms by name, including those of installed packages."""
    return TREE_FORMS_TABLE | load_installed_rows("trees", read_own_form)


def list_examples() -> list[str]:
    """Returns a value of each form, including those of installed packages."""
    return [form.example for form in list_forms().values()]


def read_own_form(name: str, path: str, part: Any) -> TreeSyntax:
    """Returns the form of a part of another package.

    Args:
        name: on the command line.
        path: `module:NAME` of the part.
        part: a `TreeSyntax`, a policy, a class of policies, whose fields are the options, or a function from whole
            numbers to a policy.

    Raises InputError for anything else.
    """
    if isinstance(part, TreeSyntax):
        return part
    if is_policy(part) and not isinstance(part, type):
        return build_sized_form(name, "", lambda: part)
    if is_policy(part) and is_dataclass(part):
        policy_class: Any = part
        return TreeSyntax(name, lambda text: policy_class(**parse_tree_options(policy_class, text)))
    if inspect.isfunction(part):
        return build_function_form(name, part)
    raise InputError(
        f"{path} is {describe_object(part)}, must be a tree: a Policy (treespec.trees.shape), a dataclass of such, or "
        "a function from whole numbers to one"
    )


def is_policy(part: object) -> bool:
    """Whether a part is a tree policy, or a class of such."""
    return hasattr(part, "grow") and hasattr(part, "max_draws")


def build_function_form(name: str, function: Callable[..., Any]) -> TreeSyntax:
    """Returns the form of a function from whole numbers to a policy: `fan:3x4` calls fan(3, 4)."""
    numbers = "x".join(name.upper() for name in inspect.signature(function).parameters)
    example = name
    if numbers:
        example = f"{name}:{numbers}"

    def read(text: str) -> Policy | None:
        if text and not re.fullmatch(r"\d+(x\d+)*", text):
            return None
        arguments = list(map(int, filter(None, text.split("x"))))
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError as error:
            raise TreeError(f"tree '{name}:{text}': {error}; write {example}") from None
        tree: Policy = function(*arguments)
        if not is_policy(tree):
            raise TreeError(f"tree {name} gives {describe_object(tree)}, must give a Policy")
        return tree

    return TreeSyntax(example, read)


def parse_policy(spec: str) -> Policy:
    """Returns the policy that a `--tree` value names: one of `list_forms`, `module:NAME` or a tree file.

    2x4 is short for balanced:2x4. Raises TreeError for an unknown name, a malformed value or a bad tree file, and
    InputError for a part of another package that cannot be loaded.
    """
    # 1. A form by its name, or a part of another package.
    name, _, text = spec.partition(":")
    form = list_forms().get(name)
    path = ""
    if form is None:
        path = find_path(spec)
    if path:
        form = load_row(path, read_own_form)
        text = spec[len(path) + 1 :]
    if form:
        tree = form.read(text)
    else:
        tree = TREE_FORMS_TABLE["balanced"].read(spec)
    if tree:
        return tree

    # 2. A file, or an error.
    if spec.endswith(".json"):
        return read_tree_file(spec)
    if form and not text and form.needs:
        raise TreeError(f"{name} needs {form.needs}, as in {form.example}")
    if form:
        raise TreeError(f"tree {spec!r} is not understood: write {form.example}")
    hint = ""
    similar_name = find_similar_name(name, list_forms())
    if similar_name is not None:
        hint = f" (did you mean {similar_name}?)"
    forms = ", ".join(list_examples())
    raise TreeError(
        f"unknown tree {spec!r}{hint}: choose {forms}, a JSON file of paths, or {describe_own(spec)}"
    )


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
