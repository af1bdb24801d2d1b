"""Tree policies by name."""

import difflib
import re
from dataclasses import fields
from typing import Any

from treespec.trees.auto import AutoTree
from treespec.trees.confident import ConfidentChain
from treespec.trees.dynamic import DynamicTree
from treespec.trees.path_file import from_file
from treespec.trees.sampled import SampledTree
from treespec.trees.static import StaticTree, TreeError, balanced, chain, eagle, medusa

Policy = StaticTree | DynamicTree | SampledTree | AutoTree | ConfidentChain

FORMS = (
    "auto, eagle, medusa, chain:5, balanced:2x4, dynamic, dynamic:depth=6,topk=10,nodes=60, sampled, "
    "sampled:nodes=26,depth=6, confident, confident:depth=8,threshold=0.8, or a JSON file of paths"
)


NAMES = ("auto", "eagle", "medusa", "chain", "balanced", "dynamic", "sampled", "confident")


def policy(spec: str) -> Policy:
    """The policy that a `--tree` value names; `FORMS` lists them. Raises TreeError."""
    name, _, rest = spec.partition(":")
    if spec == "eagle":
        return eagle()
    if spec == "medusa":
        return medusa()
    if name == "chain" and rest.isdecimal():
        return chain(int(rest))
    if match := re.fullmatch(r"(?:balanced:)?(\d+)x(\d+)", spec):
        return balanced(int(match[1]), int(match[2]))
    if name == "dynamic":
        return DynamicTree(**_options(spec, rest, DynamicTree))
    if name == "sampled":
        return SampledTree(**_options(spec, rest, SampledTree))
    if name == "confident":
        return ConfidentChain(**_options(spec, rest, ConfidentChain))
    if name == "auto":
        return AutoTree(**_options(spec, rest, AutoTree))
    if spec.endswith(".json"):
        return from_file(spec)
    close = difflib.get_close_matches(name, NAMES, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise TreeError(f"unknown tree {spec!r}{hint}: choose {FORMS}")


def _options(spec: str, rest: str, kind: type) -> dict[str, Any]:
    known = {field.name: field for field in fields(kind)}
    values: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        name, _, text = part.partition("=")
        read = int if name in known and known[name].type is int else float
        try:
            values[known[name].name] = read(text)
        except (KeyError, ValueError):
            choice = ", ".join(f"{option.name}={option.default}" for option in known.values())
            raise TreeError(f"tree {spec!r}: {part!r} is not understood; its options are {choice}") from None
    return values
