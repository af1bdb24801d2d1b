"""Tree policies by name."""

import re
from dataclasses import fields

from treespec.trees.dynamic import DynamicTree
from treespec.trees.static import StaticTree, TreeError, balanced, chain, eagle, from_file

Policy = StaticTree | DynamicTree

FORMS = "eagle, chain:5, balanced:2x4, dynamic, dynamic:depth=6,topk=10,nodes=60, or a JSON file of paths"


def policy(spec: str) -> Policy:
    """The policy that a `--tree` value names; `FORMS` lists them. Raises TreeError."""
    name, _, rest = spec.partition(":")
    if spec == "eagle":
        return eagle()
    if name == "chain" and rest.isdecimal():
        return chain(int(rest))
    if match := re.fullmatch(r"(?:balanced:)?(\d+)x(\d+)", spec):
        return balanced(int(match[1]), int(match[2]))
    if name == "dynamic":
        return DynamicTree(**_options(spec, rest))
    if spec.endswith(".json"):
        return from_file(spec)
    raise TreeError(f"unknown tree {spec!r}: choose {FORMS}")


def _options(spec: str, rest: str) -> dict[str, int]:
    known = {field.name for field in fields(DynamicTree)}
    pairs = dict(re.findall(r"(\w+)=(\d+)(?:,|$)", rest))
    if rest != ",".join(f"{name}={value}" for name, value in pairs.items()) or not known >= pairs.keys():
        raise TreeError(f"tree {spec!r} is not understood: choose {FORMS}")
    return {name: int(value) for name, value in pairs.items()}
