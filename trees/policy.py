"""Tree policies by name, as `--tree` takes them."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

from treespec.trees.auto import AutoTree
from treespec.trees.confident import ConfidentChain
from treespec.trees.ddtree import DDTree
from treespec.trees.dynamic import DynamicTree
from treespec.trees.path_file import from_file
from treespec.trees.sampled import SampledTree
from treespec.trees.shape import Policy
from treespec.trees.static import TreeError, balanced, chain, eagle, medusa


@dataclass(frozen=True)
class Form:
    """One form of a `--tree` value.

    example: a value of this form, for the help.
    read: turns the text after "name:" into the policy; None where that text is malformed.
    """

    example: str
    read: Callable[[str], Policy | None]


def with_options(kind: type[Policy]) -> Form:
    """`dynamic`, or `dynamic:depth=6,topk=10`; the example shows the defaults."""
    options = [option for option in fields(kind) if option.default is not None]
    defaults = ",".join(f"{option.name}={option.default}" for option in options)
    return Form(f"{kind.name}[:{defaults}]", lambda text: kind(**options_of(kind, text)))


def fixed(name: str, tree: Callable[[], Policy]) -> Form:
    """The name of a tree without options."""
    return Form(name, lambda text: None if text else tree())


def chain_of(text: str) -> Policy | None:
    """The chain for `5`, its depth."""
    return chain(int(text)) if text.isdecimal() else None


def balanced_of(text: str) -> Policy | None:
    """The balanced tree for `2x4`, its children a node and its depth."""
    sizes = re.fullmatch(r"(\d+)x(\d+)", text)
    return balanced(int(sizes[1]), int(sizes[2])) if sizes else None


POLICIES: dict[str, Form] = {
    "auto": with_options(AutoTree),
    "eagle": fixed("eagle", eagle),
    "medusa": fixed("medusa", medusa),
    "chain": Form("chain:5", chain_of),
    "balanced": Form("balanced:2x4", balanced_of),
    "dynamic": with_options(DynamicTree),
    "sampled": with_options(SampledTree),
    "confident": with_options(ConfidentChain),
    "ddtree": with_options(DDTree),
}
NAMES = tuple(POLICIES)
FORMS = f"{', '.join(form.example for form in POLICIES.values())}, or a JSON file of paths"


def policy(spec: str) -> Policy:
    """The policy that a `--tree` value names; `FORMS` lists the forms.

    Raises TreeError for an unknown name, a malformed value or a bad tree file.
    """
    name, _, text = spec.partition(":")
    form = POLICIES.get(name)
    found = form.read(text) if form else balanced_of(spec)
    if found:
        return found
    if spec.endswith(".json"):
        return from_file(spec)
    close = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise TreeError(f"unknown tree {spec!r}{hint}: choose {FORMS}")


def options_of(kind: type[Policy], text: str) -> dict[str, float]:
    """`depth=6,topk=10` as arguments of the policy.

    Raises TreeError for an unknown option and for a value that is no number.
    """
    known = {option.name: option for option in fields(kind)}
    values: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, number = part.partition("=")
        read = int if name in known and known[name].type is int else float
        try:
            values[known[name].name] = read(number)
        except (KeyError, ValueError):
            choice = ", ".join(f"{option.name}={option.default}" for option in known.values())
            raise TreeError(
                f"tree '{kind.name}:{text}': {part!r} is not understood; its options are {choice}"
            ) from None
    return values
