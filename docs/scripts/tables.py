"""Tables of verifiers, trees and drafters for reference.md, made from treespec's registries.

The words are here, by name; a name that a registry has and this file lacks is an error.
"""

from collections.abc import Iterable
from dataclasses import MISSING, fields
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

VERIFIER_WORDS = {  # what it is, and where it is from
    "single": (
        "one draw, accepted with chance min(1, p/q)",
        "Leviathan et al. 2023; Chen et al. 2023",
    ),
    "rrs": ("independent draws, recursive rejection sampling", "SpecInfer, Miao et al. 2024"),
    "rrs-wo": (
        "draws without replacement, recursive rejection sampling",
        "RSD, Jeon et al. 2024; Sequoia, Chen et al. 2024; EAGLE-1, Li et al. 2024",
    ),
    "kseq": (
        "independent draws, accepted in order against a scaled draft law",
        "SpecTr, Sun et al. 2023",
    ),
    "spechub": ("two draws, one of them the likeliest token", "SpecHub, Sun et al. 2024"),
    "greedy": ("the likeliest tokens, and one draw from the rest", "Hu et al. 2025"),
    "is-lp": ("independent draws, one selected by a linear program", "Khisti et al. 2025"),
    "optimal": (
        "the likeliest tokens and independent draws, coupled in closed form to reach the optimal "
        "acceptance rate α*",
        "treespec; see [verification](verification.md#how-optimal-reaches-it)",
    ),
    "topk": (
        "the likeliest tokens; the target's sample is one of them or not",
        "EAGLE-2, Li et al. 2024",
    ),
    "typical": (
        "the likeliest tokens; the best one that is typical of the target is taken",
        "Medusa, Cai et al. 2024",
    ),
    "auto": (
        "the default: each cycle drafts nothing, the likeliest tokens, a chain (`block`) or a "
        "tree of draws (`traversal`), whichever should bring most tokens a second",
        "treespec",
    ),
    "block": (
        "a chain of single draws, judged as a whole",
        "Block Verification, Sun et al. 2024",
    ),
    "traversal": (
        "the draws of `rrs-wo`, judged from the leaves upwards",
        "Traversal Verification, 2505.12398",
    ),
    "layer:greedy": (
        "the draws of `greedy`, judged a layer at a time, deepest first",
        "Layer Verification, Cha, Cho and Yun 2026",
    ),
    "layer:single": (
        "the draw of `single`, judged a layer at a time",
        "Layer Verification, Cha, Cho and Yun 2026",
    ),
    "layer:optimal": (
        "the draws of `optimal`, judged a layer at a time",
        "Layer Verification, over treespec's `optimal`",
    ),
}
TREE_WORDS = {  # name: the values that --tree takes, and what it is
    "auto": (
        "`auto`",
        "chosen each cycle by what nodes and levels cost on this machine and how often drafts "
        "were accepted so far",
        "treespec",
    ),
    "eagle": ("`eagle`", "EAGLE-1's fixed tree of 25 nodes", "EAGLE-1, Li et al. 2024"),
    "medusa": ("`medusa`", "Medusa's fixed tree of 63 nodes", "Medusa, Cai et al. 2024"),
    "chain": ("`chain:5`", "a chain of drafts", ""),
    "balanced": ("`2x4`", "children by depth: two children a node, four levels", ""),
    "dynamic": (
        "`dynamic`",
        "expand the likeliest nodes, then keep the best of all",
        "EAGLE-2, Li et al. 2024",
    ),
    "sampled": (
        "`sampled`",
        "a dynamic tree for sampled drafts: the number of draws at a node is fixed before drawing",
        "treespec",
    ),
    "confident": (
        "`confident`",
        "a chain that ends where the draft model is unsure",
        "Draft & Verify, Zhang et al. 2024",
    ),
    "ddtree": (
        "`ddtree`",
        "the likeliest paths, for heads that draft all levels at once; draws in a tree of the same "
        "shape",
        "DDTree, 2604.12989",
    ),
}


def verifiers() -> str:
    """All values of --verifier."""
    expect("verifiers", VERIFIERS, VERIFIER_WORDS)
    names = [name for name in VERIFIERS if name not in SCHEMES]  # auto and the tree-level first
    rows = []
    for name in [*names, *SCHEMES]:
        verifier = verifier_by_name(name, allow_lossy=True)
        scheme: Any = verifier.scheme
        options = options_of(scheme) if name in SCHEMES else ""
        kept = "yes" if scheme.lossless else "**no**; asks for `--allow-lossy`"
        what, source = VERIFIER_WORDS[name]
        most = scheme.max_draws or "any"
        rows.append([f"`{name}`", what, source, options, str(most), kept, goes_with(verifier)])
    columns = ["`--verifier`", "children of a node", "source", "options", "draws", "lossless"]
    return table([*columns, "trees"], rows)


def trees() -> str:
    """All values of --tree."""
    expect("trees", POLICIES, TREE_WORDS)
    rows = []
    for name in POLICIES:
        values, what, source = TREE_WORDS[name]
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


def expect(what: str, names: Iterable[str], words: Iterable[str]) -> None:
    """The registry and the words have the same names."""
    if different := set(names) ^ set(words):
        raise SystemExit(f"{what} without words in {__file__}, or words without one: {different}")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
