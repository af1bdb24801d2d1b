"""Tree policies by name, as `--tree` takes them. It loads neither torch nor numpy."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points

from treespec.trees.dynamic import AutoTree, DDTree, DynamicTree
from treespec.trees.shape import Policy, TreeError
from treespec.trees.static import balanced, chain, eagle, from_file, levels, medusa


@dataclass(frozen=True)
class Form:
    """One form of a `--tree` value.

    example: a value of this form, for the help.
    read: turns the text after "name:" into the policy; None where that text is malformed.
    """

    example: str
    read: Callable[[str], Policy | None]


def with_options(kind: type[Policy], shown: str = "") -> Form:
    """`dynamic`, or `dynamic:depth=6,topk=10`. shown: the option of the example."""
    example = kind.name
    if shown:
        example = f"{kind.name}:{shown}={getattr(kind, shown)}"

    def read(text: str) -> Policy:
        return kind(**options_of(kind, text))

    return Form(example, read)


def sized(example: str, form: str, tree: Callable[..., Policy]) -> Form:
    """A tree by its sizes. form: a pattern with a group for each, "" for a tree without sizes."""

    def read(text: str) -> Policy | None:
        sizes = re.fullmatch(form, text)
        if sizes is None:
            return None
        return tree(*map(int, sizes.groups()))

    return Form(example, read)


def read_levels(text: str) -> Policy | None:
    """`3x2x1` as a tree of so many children at each level; None for another form."""
    if not re.fullmatch(r"\d+(x\d+)*", text):
        return None
    return levels(*map(int, text.split("x")))


POLICIES: dict[str, Form] = {
    "auto": with_options(AutoTree),
    "eagle": sized("eagle", "", eagle),
    "medusa": sized("medusa", "", medusa),
    "chain": sized("chain:5", r"(\d+)", chain),
    "balanced": sized("2x4", r"(\d+)x(\d+)", balanced),
    "levels": Form("levels:3x2x1", read_levels),
    "dynamic": with_options(DynamicTree, "nodes"),
    "ddtree": with_options(DDTree, "nodes"),
}
EXAMPLES = {name: form.example for name, form in POLICIES.items()}
FORMS = f"{', '.join(EXAMPLES.values())}, or a JSON file of paths"


@cache
def forms() -> dict[str, Form]:
    """The forms by name, with those of installed packages."""
    installed = entry_points(group="treespec.trees")
    return POLICIES | {point.name: point.load() for point in installed}


def policy(spec: str) -> Policy:
    """The policy that a `--tree` value names; `FORMS` lists the forms. 2x4 is short for balanced:2x4.

    Raises TreeError for an unknown name, a malformed value or a bad tree file.
    """
    name, _, text = spec.partition(":")
    form = forms().get(name)
    if form:
        tree = form.read(text)
    else:
        tree = POLICIES["balanced"].read(spec)
    if tree:
        return tree
    if spec.endswith(".json"):
        return from_file(spec)
    hint = ""
    for close in difflib.get_close_matches(name, forms(), n=1):
        hint = f" (did you mean {close}?)"
    raise TreeError(f"unknown tree {spec!r}{hint}: choose {FORMS}")


def options_of(kind: type[Policy], text: str) -> dict[str, float]:
    """`depth=6,topk=10` as arguments of the policy.

    Raises TreeError for an unknown option and for a value that is no number.
    """
    known = {option.name: option for option in fields(kind)}
    values: dict[str, float] = {}
    parts = []
    if text:
        parts = text.split(",")
    for part in parts:
        name, _, number = part.partition("=")
        try:
            if known[name].type is int:
                values[name] = int(number)
            else:
                values[name] = float(number)
        except (KeyError, ValueError):
            choice = ", ".join(f"{option.name}={option.default}" for option in known.values())
            raise TreeError(
                f"tree '{kind.name}:{text}': {part!r} is not understood; its options are {choice}"
            ) from None
    return values
