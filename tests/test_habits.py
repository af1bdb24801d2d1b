"""Habits of the code: few rooms; and what a part can do it says itself, nobody asks for its class."""

import ast
import re
from functools import cache

import pytest
from reading_counts import ROOT, SOURCE_MODULES, imported_names

SEAMS = {  # folders or files whose classes are asked for nowhere but in the file that defines them
    "verifiers": ["treespec/verify"],
    "policies": ["trees"],
    "growers": ["treespec/draft/builders.py", "treespec/draft/tree_assembly.py", "treespec/draft/auto/builder.py"],
}


def files_of(places):
    return [file for place in places for file in sorted((ROOT / place).rglob("*.py")) or [ROOT / place]]


def classes_in(file):
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef)}


def names_in(node):
    """Eagle, kinds.Eagle and (Eagle, Medusa | Hydra) as names."""
    inner = ast.walk(node)
    return {n.id if isinstance(n, ast.Name) else n.attr for n in inner if isinstance(n, ast.Name | ast.Attribute)}


@cache
def class_tests(source):
    """The classes that a source asks for: by isinstance, issubclass, type(x) is, or a case of match."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            found |= names_in(node.args[1])
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
            found |= set().union(*map(names_in, node.comparators))
        elif isinstance(node, ast.MatchClass):
            found |= names_in(node.cls)
    return found


@pytest.mark.parametrize("seam", SEAMS)
def test_nobody_asks_for_the_class_behind_a_seam(seam):
    defined = {file: classes_in(file) for file in files_of(SEAMS[seam])}
    everything = set().union(*defined.values())
    assert everything
    asked = {file: class_tests(file.read_text()) for file in SOURCE_MODULES.values()}
    wrong = {str(file): names & (everything - defined.get(file, set())) for file, names in asked.items()}
    assert not {file: names for file, names in wrong.items() if names}


def test_such_questions_are_found():
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


# Until names and rooms are counted as a stranger reads them.
CEILINGS = {
    "rooms": 20,
    "imports between rooms": 120,
    "circles of files, type-only imports too": 0,
}


def edges():
    """Module -> the modules that it imports, anywhere in the file, for types too."""
    found: dict[str, set[str]] = {}
    for module, file in SOURCE_MODULES.items():
        named = (name if name in SOURCE_MODULES else name.rpartition(".")[0] for name in imported_names(file))
        found[module] = {name for name in named if name in SOURCE_MODULES} - {module, "treespec"}
    return found


def circles(graph):
    """Groups of two modules or more that import each other, directly or not."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen = set[str]()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reach[start] = seen
    return {frozenset(b for b in reach[a] if a in reach[b]) for a in graph if a in reach[a]}


def room(module):
    """A folder of treespec/, a file at its root, or heads, trees, train or eval."""
    return ".".join(module.split(".")[:2])


def test_rooms_stay_few_and_import_without_circles():
    graph = edges()
    inhabited = {m for m, file in SOURCE_MODULES.items() if file.stat().st_size and file.name != "__main__.py"}
    counted = {
        "rooms": len({room(module) for module in inhabited}),
        "imports between rooms": len({(room(a), room(b)) for a in graph for b in graph[a] if room(a) != room(b)}),
        "circles of files, type-only imports too": len(circles(graph)),
    }
    assert {name: n for name, n in counted.items() if n > CEILINGS[name]} == {}, counted


def test_a_circle_of_imports_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {frozenset("bc")}


def test_the_source_says_what_the_field_says():
    words = re.compile(r"\b(in place of|anew|likeliest|phantom|laws?|company|paced|heard|taps)\b")
    assert not [str(file) for file in SOURCE_MODULES.values() if words.search(file.read_text())]
