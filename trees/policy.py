"""Tree policies by name."""

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
    raise TreeError(f"unknown tree {spec!r}: choose {FORMS}")


def _options(spec: str, rest: str, kind: type) -> dict[str, Any]:
    known = {field.name: field.type for field in fields(kind)}
    pairs = dict(re.findall(r"(\w+)=(\d+|\d*\.\d+)(?:,|$)", rest))
    bad = [name for name, value in pairs.items() if name not in known or (known[name] is int and "." in value)]
    if bad or rest != ",".join(f"{name}={value}" for name, value in pairs.items()):
        raise TreeError(f"tree {spec!r} is not understood: choose {FORMS}")
    return {name: int(value) if known[name] is int else float(value) for name, value in pairs.items()}
