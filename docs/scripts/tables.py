"""Tables of verifiers, trees and drafters for reference.md, made from treespec's registries and words.toml."""

import tomllib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from treespec.draft.drafters import DRAFTERS, DrafterSpec
from treespec.draft.pairing import check_named
from treespec.errors import InputError
from treespec.trees.policy import POLICIES, policy
from treespec.verify.facts import NAMES as VERIFIERS
from treespec.verify.registry import SCHEMES, verifier_by_name

HEAD = "head:ORGANISATION/HEAD"  # on the hub, so of any kind: any verifier and tree may have it
SHAPES = {  # the column of a tree, and an instance of it
    "chain": "chain:2",
    "static": "2x2",
    "dynamic": "dynamic",
    "sampled": "sampled",
    "confident": "confident",
    "auto": "auto",
    "ddtree": "ddtree",
}

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))


def verifiers() -> str:
    """All values of --verifier."""
    expect("verifiers", VERIFIERS)
    names = [name for name in VERIFIERS if name not in SCHEMES]  # auto and the tree-level first
    rows = []
    for name in [*names, *SCHEMES]:
        verifier = verifier_by_name(name, allow_lossy=True)
        scheme: Any = verifier.scheme
        options = options_of(scheme) if name in SCHEMES else ""
        kept = "yes" if scheme.lossless else "**no**; asks for `--allow-lossy`"
        what, source = WORDS["verifiers"][name]
        most = scheme.max_draws or "any"
        rows.append([f"`{name}`", what, source, options, str(most), kept, goes_with(verifier)])
    columns = ["`--verifier`", "children of a node", "source", "options", "draws", "lossless"]
    return table([*columns, "trees"], rows)


def trees() -> str:
    """All values of --tree."""
    expect("trees", POLICIES)
    rows = []
    for name in POLICIES:
        values, what, source = WORDS["trees"][name]
        tree: Any = policy(values.split("`")[1])
        options = "" if hasattr(tree, "paths") else options_of(tree)
        rows.append([values, what, source, options])
    rows.append(["`tree.json`", "a JSON list of paths, as `treespec tree` writes it", "", ""])
    return table(["`--tree`", "shape", "source", "options"], rows)


def drafters() -> str:
    """All values of --drafter."""
    rows = []
    for row in DRAFTERS.values():
        values = ", ".join(f"`{form}`" for form in row.forms)
        options = options_of(row.options) if row.options else ""
        rows.append([values, row.summary, row.source, options])
    return table(["`--drafter`", "drafts", "source", "options"], rows)


def goes_with(verifier: Any) -> str:
    """The trees that a verifier takes."""
    return ", ".join(shape for shape, tree in SHAPES.items() if fits(verifier, tree))


def fits(verifier: Any, tree: str) -> bool:
    """Whether the pairing rules let some head have this verifier and tree."""
    try:
        check_named(DrafterSpec.parse(HEAD), verifier, policy(tree))
    except InputError:
        return False
    return True


def options_of(config: Any) -> str:
    """The fields of a dataclass as name=default."""
    shown = []
    for field in fields(config):
        value = field.default
        words = "/".join(f"{x:g}" for x in value) if isinstance(value, tuple) else str(value)
        unset = value is MISSING or value is None or not words
        shown.append(f"`{field.name.replace('_', '-')}{'' if unset else f'={words}'}`")
    return ", ".join(shown)


def expect(what: str, names: Iterable[str]) -> None:
    """The registry and words.toml have the same names."""
    if different := set(names) ^ WORDS[what].keys():
        raise SystemExit(f"{what} without words in words.toml, or words without one: {different}")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
