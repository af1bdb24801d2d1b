"""Habits of the code: what a scheme, policy or grower can do, it says itself; nobody asks for its class."""

import ast
from pathlib import Path

import pytest
from test_house import MODULES, ROOT

SEAMS = {  # folders or files whose classes are asked for nowhere but in the file that defines them
    "verifiers": ["treespec/verify"],
    "policies": ["trees"],
    "growers": ["treespec/draft/grow"],
}


def files_of(places: list[str]) -> list[Path]:
    return [file for place in places for file in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]]


def classes_in(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)}


def names_in(node: ast.expr) -> set[str]:
    """Eagle, kinds.Eagle and (Eagle, Medusa | Hydra) as names."""
    inner = ast.walk(node)
    return {n.id if isinstance(n, ast.Name) else n.attr for n in inner if isinstance(n, ast.Name | ast.Attribute)}


def class_tests(source: str) -> set[str]:
    """The classes that a source asks for: by isinstance, issubclass, type(x) is, or a case of match."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            found |= names_in(node.args[1])
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            found |= set().union(*map(names_in, node.comparators))
        elif isinstance(node, ast.MatchClass):
            found |= names_in(node.cls)
    return found


@pytest.mark.parametrize("seam", SEAMS)
def test_nobody_asks_for_the_class_behind_a_seam(seam: str) -> None:
    defined = {file: classes_in(file) for file in files_of(SEAMS[seam])}
    everything = set().union(*defined.values())
    assert everything
    asked = {file: class_tests(file.read_text()) for file in MODULES.values()}
    wrong = {str(file): names & (everything - defined.get(file, set())) for file, names in asked.items()}
    assert not {file: names for file, names in wrong.items() if names}


def test_such_questions_are_found() -> None:
    for source in (
        "isinstance(tree, static.StaticTree)",
        "isinstance(tree, (int, AutoTree | StaticTree))",
        "issubclass(type(tree), StaticTree)",
        "type(tree) is StaticTree",
        "type(tree) in (AutoTree, StaticTree)",
        "match tree:\n    case StaticTree(): pass",
    ):
        assert "StaticTree" in class_tests(source), source
    assert class_tests("tree: StaticTree = StaticTree(paths)\nisinstance(paths, list)") == {"list"}
